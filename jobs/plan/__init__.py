"""`manta plan`: plans a pair's layout over a node's GPUs; the arithmetic is in `cluster/planner/`."""
