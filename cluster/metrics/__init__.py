"""Metrics without a client library: definitions, histograms, bounded label values. Start with
`engine_metrics.py`."""
