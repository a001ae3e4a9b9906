"""Reference implementations and the cases that are compared with them."""
