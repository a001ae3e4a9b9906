"""OpenAI's Responses API without storage: each request has the whole conversation. Start with `routes.py`."""
