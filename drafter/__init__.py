"""Numerics of both models: layers, kernels, the decoding step, and the DFlash, EAGLE-3 and n-gram proposers.

Uses torch, Numba and Triton; never Ray or torch.distributed. DFlash itself (arXiv 2602.06036) is in
`dflash/`; start with `dflash/model.py` and `step/__init__.py`.
"""
