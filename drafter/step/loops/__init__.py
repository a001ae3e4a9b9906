"""A step's rows, choice and verdict, compiled on a CPU; `operators.py` is the way in."""
