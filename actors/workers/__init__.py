"""An engine's processes under Ray: placing, starting and watching them, and what travels between them."""
