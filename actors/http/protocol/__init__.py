"""Request and response bodies in the formats of OpenAI and vLLM. Start with `protocol.py`."""
