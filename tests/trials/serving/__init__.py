"""Pieces of a server killed under load. Start with `serving_chaos.py`."""
