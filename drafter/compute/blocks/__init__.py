"""Blocks of layers: transformer block, MLP, DFlash2's block."""
