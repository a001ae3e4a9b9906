"""Readers of quantized checkpoints, one module per format. Start with `quantized_tensors.py`."""
