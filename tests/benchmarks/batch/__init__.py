"""Benchmarks of batch jobs. Start with `batch.py`."""
