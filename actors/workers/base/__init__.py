"""Placing and starting workers. Start with `worker_base.py`."""
