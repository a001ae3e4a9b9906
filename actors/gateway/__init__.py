"""The gateway in front of replicas and models: routing, retries, resumed streams. Start with `app.py`."""
