"""A step's inputs: rows, sampling metadata, noise. Start with `row_layout.py`."""
