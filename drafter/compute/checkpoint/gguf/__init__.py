"""Reader of GGUF, llama.cpp's file format. Start with `gguf_file.py`."""
