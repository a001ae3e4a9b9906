"""Benchmarks of engines on this machine: drafters, policies, grammars. Commands are in `../cli.py`."""
