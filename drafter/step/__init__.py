"""The rule of a step: rows, choice under noise, verdict.

What it means stands here; files of the same names do it in loops on a CPU (`loops/`), and by kernels over
state that lives on a GPU (`device/`).
"""
