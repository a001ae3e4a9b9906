"""Linear layers in Triton. Start with `projections.py`."""
