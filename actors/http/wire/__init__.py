"""JSON, SSE, errors and request ids as bytes. Start with `sse.py`."""
