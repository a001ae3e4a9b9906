"""Decides each step: which requests, how many rows, how many drafts. Start with `scheduler.py`."""
