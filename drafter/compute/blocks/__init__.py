"""Blocks of layers: transformer block, MLP, DFlash2's block. Start with `transformer_block.py`."""
