"""`manta serve`. Start with `server.py`."""
