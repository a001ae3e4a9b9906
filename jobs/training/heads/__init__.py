"""Trainable drafters and their losses: DFlash and DFlash2. Start with `trainables.py`."""
