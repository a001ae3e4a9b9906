"""Reads datasets: files, formats, rows, prompts. Start with `source.py`."""
