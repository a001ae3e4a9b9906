"""Training data of drafters. Start with `continuations.py`."""
