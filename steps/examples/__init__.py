"""Examples for a policy to imitate: chats, and the best attempts of a run."""
