"""`manta plan`: how to lay out a pair over a node's GPUs (the arithmetic is `cluster/planner/`'s)."""
