"""Runs a request of any API: translation, generation, streams. Start with `generation.py`."""
