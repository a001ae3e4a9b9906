"""`manta simulate node`: simulates load on a node of GPUs, by method. Read `node.py` first."""
