"""`LoopStepOperators`: `StepOperators` for CPUs, in compiled loops.

A call of NumPy or PyTorch takes a microsecond or more, and a step of one request needs dozens of them. What
has no loop here is computed by the definition. Chosen at load (`actors/targets/loading/operators.py`).
"""

from __future__ import annotations

from ..operators import StepOperators
from . import candidates, choice, masks, paths, rows, trimming, verification


class LoopStepOperators(StepOperators):
    """For state in the host's memory; logits are fp32 or bf16."""

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


LOOPS = LoopStepOperators()
