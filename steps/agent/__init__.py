"""What plays an agent against a served policy and keeps the exact tokens of everything the model read and wrote."""
