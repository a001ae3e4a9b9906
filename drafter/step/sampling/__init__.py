"""Sampling, verification and draft selection, as defined. Start with `verification.py`."""
