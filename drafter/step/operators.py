"""Operators of a step that the host drives: they lay out rows, choose tokens, trim and verify drafts.

    StepOperators        NumPy and PyTorch, on any device: the definition, in `rows.py`, `masks.py`,
                         `choice.py`, `candidates.py`, `paths.py`, `trimming.py`, `verification.py`
    LoopStepOperators    compiled loops, on a CPU: files of the same names in `loops/`. Integers are equal,
                         noise differs by units in the last place

`actors/targets/loading/operators.py` chooses one of them when a runner is made. Steps that a GPU drives use
kernels that read state on the device instead (`device/`).
"""

from __future__ import annotations

from . import candidates, choice, masks, paths, rows, trimming, verification


class StepOperators:
    """The definition."""

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
