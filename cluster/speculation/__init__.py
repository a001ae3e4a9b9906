"""Chooses draft lengths from acceptance and step cost. Start with `draft_length_policy.py`."""
