"""`StepOperators` for CPUs, in compiled loops.

Each NumPy or PyTorch call takes a microsecond or more, and a step of one request needs dozens of them.
Operators without a loop here are the definition's. Chosen at load
(`actors/targets/loading/operator_factory.py`).
"""

from __future__ import annotations

from ..sampling.step_ops import StepOperators
from . import grammar_masks, gumbel_argmax, row_layout, selector, verification


class LoopStepOperators(StepOperators):
    """Operators for state in host memory; logits are fp32 or bf16."""

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


LOOPS = LoopStepOperators()
