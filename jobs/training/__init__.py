"""Trains a drafter for any target; read `train_drafter.py` first. `models/recipe/` makes the shipped pair
with it.

Nothing here is imported while serving.
"""
