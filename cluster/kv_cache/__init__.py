"""Owners of pages and states, their pools, and the prefix cache. Start with `kv_cache_manager.py`."""
