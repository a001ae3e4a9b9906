"""`manta simulate node`: simulates load on a node of GPUs, by method. Read `node_run.py` first."""
