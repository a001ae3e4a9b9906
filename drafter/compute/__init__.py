"""Operators of both models: definitions in PyTorch (`layers/`, `blocks/`, `eager/`) and faster backends.

Read `backend.py` first.
"""
