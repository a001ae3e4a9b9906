"""A step's rows, states, choice and verdict on a GPU: Triton kernels."""
