"""The step's operators in Numba for CPUs. Start with `step_ops.py`."""
