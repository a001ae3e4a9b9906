"""A step on a GPU, in Triton kernels. Start with `request_states.py`."""
