"""Kernels over elements of rows, and what all kernels share. Start with `element_ops.py`."""
