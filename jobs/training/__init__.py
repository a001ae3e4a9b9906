"""Trains a drafter for any target, also the shipped one (`models/recipe/`). Start with `train_drafter.py`."""
