"""The HTTP server: routes compatible with OpenAI, vLLM and Anthropic. Start with `app.py`."""
