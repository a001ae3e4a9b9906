"""Benchmarks over HTTP: load, overhead, scaling, long runs. Start with `http_load.py`."""
