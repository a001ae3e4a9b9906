"""Metrics and logs of an engine process. Start with `telemetry.py`."""
