"""Datasets: reading rows, answering them, and keeping each result exactly once. Start at
`actors/batch/ledger/ledger.py`."""
