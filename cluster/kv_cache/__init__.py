"""Owners of pages and states, and the prefix cache. Start with `kv_cache_manager.py`."""
