"""Datasets: reads rows, answers them, stores each result exactly once. Start with `ledger/ledger.py`."""
