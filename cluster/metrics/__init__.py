"""Metrics without a client library: definitions, histograms, labels. Start with `engine_metrics.py`."""
