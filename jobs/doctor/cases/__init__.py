"""Test cases of all kernels: operands, the reference result and an error bound. Read `checks.py` first.

`manta doctor` runs them on the device at hand, the tests in Triton's interpreter with small sizes. The
reference is the definition (`drafter/compute/eager/`: PyTorch's operators only) in fp64 on the same operands.
"""
