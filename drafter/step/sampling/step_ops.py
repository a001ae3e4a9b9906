"""Operators of a host-driven step: they lay out rows, sample tokens, trim and verify drafts.

    StepOperators        NumPy and PyTorch, on any device: the definition, in `inputs/row_layout.py` and this
                         folder's `grammar_masks.py`, `gumbel_argmax.py`, `selector.py` and `verification.py`
    LoopStepOperators    compiled loops on a CPU: files of the same names in `cpu_numba/`. Integers are equal,
                         noise differs by units in the last place

`actors/targets/loading/operator_factory.py` chooses one of them when a runner is made. Device-driven steps
use kernels that read state on the GPU instead (`gpu_triton/`).
"""

from __future__ import annotations

from ..inputs import row_layout
from . import grammar_masks, gumbel_argmax, selector, verification


class StepOperators:
    """The operators as defined in NumPy and PyTorch."""

    lay_out_rows = staticmethod(row_layout.lay_out_rows)
    write_tokens = staticmethod(row_layout.write_tokens)
    by_request = staticmethod(row_layout.by_request)
    mask_tokens = staticmethod(grammar_masks.mask_tokens)
    argmax_margin = staticmethod(gumbel_argmax.argmax_margin)
    are_numbers = staticmethod(gumbel_argmax.are_numbers)
    noisy_argmax_margin = staticmethod(gumbel_argmax.noisy_argmax_margin)
    candidates = staticmethod(selector.candidates)
    walk = staticmethod(selector.walk)
    trim = staticmethod(verification.trim)
    accept = staticmethod(verification.accept)


DEFINITION = StepOperators()
