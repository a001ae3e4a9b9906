"""Decisions: requests, pages, scheduling and metrics. Plain Python and NumPy, without torch and Ray."""
