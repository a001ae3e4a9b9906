"""`manta compile`: fills Triton's cache with the kernels of a pair, without a GPU.

`compile_run.py` is the command; read `pretended_gpu.py` next, on which an engine's whole start runs.
"""
