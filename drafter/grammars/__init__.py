"""Grammars held to where tokens are chosen; the one room that knows llguidance. Masks are NumPy's."""
