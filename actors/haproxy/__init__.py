"""Runs HAProxy for Ray Serve: private files, a supervisor, readiness probes and joined metrics.

Start with `supervisor.py`, the process that Serve starts in place of HAProxy.
"""
