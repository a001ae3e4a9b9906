"""The asynchronous engine: requests in, streams of outputs out. Start with `async_engine.py`."""
