"""4-bit weights. Start with `packed_4bit.py`."""
