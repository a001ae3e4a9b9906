"""Operators between GEMMs, compiled for any CPU by Numba. Start with `backend.py`."""
