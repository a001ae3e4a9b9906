"""Applies grammars where tokens are sampled; the only user of llguidance. Start with `matchers.py`."""
