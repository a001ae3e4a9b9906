"""An engine's processes under Ray: placing, starting and watching them, and the channels between them."""
