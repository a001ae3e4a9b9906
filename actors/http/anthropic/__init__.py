"""Anthropic's Messages API. Start with `routes.py`."""
