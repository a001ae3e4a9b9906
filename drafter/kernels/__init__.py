"""What runs on a GPU in one launch where PyTorch needs many: Triton kernels of a step.

Imported only when the `triton` backend was chosen; nothing else of the product needs Triton.
"""
