"""Text to tokens and back: tokenizers, chat templates, incremental decoding. Start with `tokenizer.py`."""
