"""Trainable drafters and their losses: DFlash, DFlash2, EAGLE-3. Start with `trainables.py`."""
