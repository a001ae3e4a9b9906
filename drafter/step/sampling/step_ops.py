"""Operators of a host-driven step: they lay out rows, sample tokens, trim and verify drafts.

    StepOperators        NumPy and PyTorch, on any device: the definition, in `inputs/row_layout.py` and this
                         folder's `grammar_masks.py`, `gumbel_argmax.py`, `selector_candidates.py`,
                         `selector_walk.py`, `draft_trimming.py` and `verification.py`
    LoopStepOperators    compiled loops on a CPU: files of the same names in `cpu_numba/`. Integers are equal,
                         noise differs by units in the last place

`actors/targets/loading/operator_factory.py` chooses one of them when a runner is made. Device-driven steps
use kernels that read state on the GPU instead (`gpu_triton/`).
"""

from __future__ import annotations

from ..inputs import row_layout as rows
from . import draft_trimming as trimming
from . import grammar_masks as masks
from . import gumbel_argmax as choice
from . import selector_candidates as candidates
from . import selector_walk as paths
from . import verification


class StepOperators:
    """The operators as defined in NumPy and PyTorch."""

    lay_out_rows = staticmethod(rows.lay_out_rows)
    write_tokens = staticmethod(rows.write_tokens)
    by_request = staticmethod(rows.by_request)
    mask_tokens = staticmethod(masks.mask_tokens)
    argmax_margin = staticmethod(choice.argmax_margin)
    are_numbers = staticmethod(choice.are_numbers)
    noisy_argmax_margin = staticmethod(choice.noisy_argmax_margin)
    candidates = staticmethod(candidates.candidates)
    walk = staticmethod(paths.walk)
    trim = staticmethod(trimming.trim)
    accept = staticmethod(verification.accept)


DEFINITION = StepOperators()
