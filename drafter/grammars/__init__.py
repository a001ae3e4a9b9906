"""Applies grammars where tokens are sampled; the only folder that imports llguidance. Masks are NumPy arrays.

Read `matchers.py` first.
"""
