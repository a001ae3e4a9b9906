"""Readers of checkpoints: config.json, safetensors, packed formats. Start with `safetensors_reader.py`."""
