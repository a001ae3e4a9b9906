"""EAGLE-3 (arXiv 2503.01840): a one-layer model that drafts a chain from the target's states.

Read `model.py` first, then `proposer.py`.
"""
