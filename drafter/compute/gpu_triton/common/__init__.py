"""Launch options of all Triton kernels."""
