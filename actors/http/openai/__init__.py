"""OpenAI's routes: chat, completions, models; and vLLM's tokenization routes. Start with `chat.py`."""
