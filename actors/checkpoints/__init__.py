"""Where a model's files are, and a GGUF file as Hugging Face's folder. Start with `checkpoint_paths.py`."""
