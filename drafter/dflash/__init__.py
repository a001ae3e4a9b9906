"""DFlash (arXiv 2602.06036): a small model that drafts a whole block from the target's hidden states.

Read `model.py` first, then `proposer.py`.
"""
