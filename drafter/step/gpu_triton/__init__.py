"""A step on a GPU: rows, states, sampling and verification in Triton kernels. Start with
`request_states.py`."""
