"""The rule of a step: its rows, the choice of tokens under noise, the verification of drafts.

The definitions are here. Files of the same names compute the same in compiled loops on a CPU (`cpu_numba/`)
and in kernels over state on a GPU (`gpu_triton/`).
"""
