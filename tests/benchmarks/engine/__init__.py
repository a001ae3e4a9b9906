"""Benchmarks of engines on this machine: drafters, policies, shared machines. Commands are in `../cli.py`."""
