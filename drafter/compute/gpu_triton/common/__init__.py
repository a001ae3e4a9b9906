"""How all Triton kernels are launched."""
