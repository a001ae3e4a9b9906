"""A step's inputs on the GPU. Start with `row_layout.py`."""
