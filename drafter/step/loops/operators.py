"""`LoopStepOperators`: what `TorchStepOperators` means on CPUs, in compiled loops.

NumPy and PyTorch take a microsecond or more per operation, and a step of one request wants dozens of them.
Chosen at load (`actors/targets/loading/operators.py`).
"""

from __future__ import annotations

from . import choice, masks, rows, verification


class LoopStepOperators:
    """In the host's memory; logits in fp32 or bf16."""

    lay_out_rows = staticmethod(rows.lay_out_rows)
    write_tokens = staticmethod(rows.write_tokens)
    by_request = staticmethod(rows.by_request)
    mask_tokens = staticmethod(masks.mask_tokens)
    argmax = staticmethod(choice.argmax)
    noisy_argmax = staticmethod(choice.noisy_argmax)
    accept = staticmethod(verification.accept)


LOOPS = LoopStepOperators()
