"""A step's inputs and transfers on the GPU. Start with `row_layout.py`."""
