"""Gated delta nets in Triton. Start with `gated_delta_net.py`."""
