"""Layers around the routes: request ids, keys, limits, CORS. Start with `request_gate.py`."""
