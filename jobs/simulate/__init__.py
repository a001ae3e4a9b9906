"""`manta simulate node`: load over a node of GPUs, method beside method. Begin with `node.py`."""
