"""Training data: prompts, the target's answers, chat samples. Start with `corpus.py`."""
