"""`LoopStepOperators`: what `StepOperators` means on CPUs, in compiled loops.

NumPy and PyTorch take a microsecond or more per operation, and a step of one request wants dozens of them.
Chosen at load (`actors/targets/loading/operators.py`).
"""

from __future__ import annotations

from ..operators import StepOperators
from . import candidates, choice, lookup, masks, paths, rows, trimming, verification


class LoopStepOperators(StepOperators):
    """In the host's memory; logits in fp32 or bf16."""

    lay_out_rows = staticmethod(rows.lay_out_rows)
    write_tokens = staticmethod(rows.write_tokens)
    by_request = staticmethod(rows.by_request)
    look_up = staticmethod(lookup.look_up)
    mask_tokens = staticmethod(masks.mask_tokens)
    argmax_margin = staticmethod(choice.argmax_margin)
    are_numbers = staticmethod(choice.are_numbers)
    noisy_argmax_margin = staticmethod(choice.noisy_argmax_margin)
    candidates = staticmethod(candidates.candidates)
    walk = staticmethod(paths.walk)
    trim = staticmethod(trimming.trim)
    take_out = staticmethod(trimming.take_out)
    accept = staticmethod(verification.accept)


LOOPS = LoopStepOperators()
