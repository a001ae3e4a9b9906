"""Pages of K/V: groups of layers that share them, and the pool. Start with `page_pool.py`."""
