"""A step's rows, choice and verdict, compiled on a CPU; `step_ops.py` is the way in."""
