"""Writes each answer exactly once, and resumes. Start with `ledger.py`."""
