"""Who holds which pages and states, and which prefixes are cached. Start with `kv_cache_manager.py`."""
