"""Decides: requests, pages, scheduling, metrics. Plain Python and NumPy; neither torch nor Ray."""
