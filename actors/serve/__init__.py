"""Parts of a Ray Serve replica besides HTTP. Start with `replica_lifecycle.py`."""
