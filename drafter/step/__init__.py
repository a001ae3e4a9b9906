"""A decoding step: laying out rows, sampling tokens with keyed noise, verifying drafts.

`inputs/` and `sampling/` hold the definitions. Files of the same names implement them in compiled loops on a
CPU (`cpu_numba/`) and in kernels over device-resident state on a GPU (`gpu_triton/`). Read
`sampling/sampler.py` and `sampling/verification.py` first.
"""
