"""Writes each result exactly once, and resumes jobs. Start with `ledger.py`."""
