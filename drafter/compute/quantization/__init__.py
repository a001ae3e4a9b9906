"""4-bit weights."""
