"""Tiles of registers: products of rows with bf16 weights and with codes. Read `simd_tiles.py` first."""
