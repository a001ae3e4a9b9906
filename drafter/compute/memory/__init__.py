"""K/V caches and recurrent states in memory. Start with `kv_cache.py`."""
