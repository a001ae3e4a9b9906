"""Definitions of layers: shapes and weights, independent of a backend. Start with `linear.py`."""
