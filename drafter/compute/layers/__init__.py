"""Definitions of layers, without a way to compute them. Start with `linear.py`."""
