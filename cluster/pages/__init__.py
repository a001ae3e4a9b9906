"""Which layers share K/V pages, and from which pools; sizes of states. Start with `kv_cache_groups.py`."""
