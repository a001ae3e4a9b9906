"""What lies between products, compiled for any CPU by Numba."""
