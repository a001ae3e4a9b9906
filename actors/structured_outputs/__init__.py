"""JSON schemas and structural tags as grammars, and limits on them. Start with `grammar_frontend.py`."""
