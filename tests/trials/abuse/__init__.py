"""Hostile clients. Start with `abuse.py`."""
