"""Mixtures of experts in Triton, in 16, 8 and 4 bits. Start with `moe.py`."""
