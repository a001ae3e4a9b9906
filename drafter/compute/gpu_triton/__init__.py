"""Triton kernels of a pass. Start with `backend.py`."""
