"""Operators of both models: definitions in PyTorch (`layers/`, `blocks.py`, `eager/`) and faster backends.

Read `backend.py` first.
"""
