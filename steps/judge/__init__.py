"""RULER: a judge, any model behind OpenAI's API, ranks the attempts of a group by comparing them with one another."""
