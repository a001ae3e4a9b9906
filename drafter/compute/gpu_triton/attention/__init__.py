"""Paged attention and MLA in Triton. Start with `paged_attention.py`."""
