"""How the shipped pair is made: corpus, tokenizer, target, continuations, drafter, figures.

Nothing here is imported while serving. `pair.py` runs the stages in order.
"""
