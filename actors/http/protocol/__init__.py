"""Bodies of requests and answers as OpenAI and vLLM define them. Start with `protocol.py`."""
