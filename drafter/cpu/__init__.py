"""A layer's small operations on a CPU, compiled by Numba."""
