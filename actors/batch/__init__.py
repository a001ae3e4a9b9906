"""Datasets: reading rows, answering them, and storing each result exactly once. Start with
`actors/batch/ledger/ledger.py`.
"""
