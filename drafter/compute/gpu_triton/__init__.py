"""Triton kernels of a pass."""
