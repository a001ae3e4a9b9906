"""Training of a drafter for any target. Begin with `train.py`; `models/recipe/` makes the shipped pair by it.

Nothing here is imported while serving.
"""
