"""Manta compared with other systems. Start with `compare.py`."""
