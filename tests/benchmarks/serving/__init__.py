"""Benchmarks over HTTP: overhead, scaling, long runs. Start with `serve_tax.py`."""
