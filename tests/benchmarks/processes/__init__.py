"""Processes and CPU time of a benchmark's machine. Start with `process_tree.py`."""
