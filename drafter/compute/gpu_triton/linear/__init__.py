"""Linear layers, norms and activations in Triton. Start with `projections.py`."""
