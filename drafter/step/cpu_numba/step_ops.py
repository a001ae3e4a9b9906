"""`StepOperators` for CPUs, in compiled loops.

Each NumPy or PyTorch call takes a microsecond or more, and a step of one request needs dozens of them.
Operators without a loop here are the definition's. Chosen at load
(`actors/targets/loading/operator_factory.py`).
"""

from __future__ import annotations

from ..sampling.step_ops import StepOperators
from . import draft_trimming as trimming
from . import grammar_masks as masks
from . import gumbel_argmax as choice
from . import row_layout as rows
from . import selector_candidates as candidates
from . import selector_walk as paths
from . import verification


class LoopStepOperators(StepOperators):
    """Operators for state in host memory; logits are fp32 or bf16."""

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
