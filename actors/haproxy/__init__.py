"""Runs HAProxy for Ray Serve: private files, probes, metrics. Start with `supervisor.py`."""
