"""What a step driven from the host does with rows, tokens and choices: the operators, and what they mean.

    StepOperators        NumPy and PyTorch, anywhere: the definition, in `rows.py`, `lookup.py`, `masks.py`,
                         `choice.py`, `candidates.py`, `paths.py`, `trimming.py`, `verification.py`
    LoopStepOperators    compiled loops, on a CPU: `loops/`, of the same files. Integers are equal, noise to
                         units in the last place

Which ones is chosen where a runner is made (`actors/targets/loading/operators.py`). A GPU's own steps have
kernels instead, that read state on the device: `device/`.
"""

from __future__ import annotations

from . import candidates, choice, lookup, masks, paths, rows, trimming, verification


class StepOperators:
    """The definition."""

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


DEFINITION = StepOperators()
