"""EAGLE-3 (arXiv 2503.01840) drafts a chain from the target's states. Start with `model.py`."""
