"""Every kernel with its operands, what it must compute, and how far it may be off.

`manta doctor` runs these cases on the device at hand, the tests in Triton's interpreter at small sizes. A
kernel must compute what the definition (`drafter/compute/eager/`: PyTorch's operators alone) computes in fp64
of the same operands. Read `case.py` first.
"""
