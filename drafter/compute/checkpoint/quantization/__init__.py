"""Readers of quantized checkpoints, one module per format. Start with `scheme.py`."""
