"""Batch jobs' decisions: leases on rows, the search for poison rows, the number of engines. Start with
`leases.py`."""
