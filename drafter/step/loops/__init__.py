"""A step's rows and choice, compiled on a CPU."""
