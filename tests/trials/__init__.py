"""Trials that take minutes and are no part of `make test`; each is a command:

    python tests/trials NAME ...

`abuse` (hostile clients), `serving_chaos` (pieces of a server killed), `mutations` (the product broken in one
place at a time), `first_ten_minutes`, `gguf_vocabularies` (ids compared with llama.cpp's and with
published tokenizers), `published_models` (tokens and perplexity of GGUF files compared with transformers
and llama.cpp), `kv_tier` (what K/V pages on disk save, and engines killed while they move), `ui_pictures`.
Tests run short forms of some of them.
"""
