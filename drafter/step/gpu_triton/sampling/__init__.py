"""Sampling, grammar masks and logits processors in Triton. Start with `sampler.py`."""
