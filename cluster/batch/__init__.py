"""Batch jobs' decisions: leases on rows, poison rows, the number of engines. Start with `leases.py`."""
