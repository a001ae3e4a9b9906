"""Datasets: reading rows, answering them, and keeping each result exactly once. Start at `ledger.py`."""
