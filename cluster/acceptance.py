"""How many tokens a verified block of drafts brings: one formula and one name for it.

The *mean acceptance length* is vLLM's: 1 + accepted drafts / verified blocks. The 1 is the bonus token, which
the target adds to every block, whatever was accepted. A block is what one request has verified in one step
(vLLM's `num_drafts`, here also a request's `num_steps`). Where nothing was drafted there is no such length:
None, null in JSON, "-" in tables.
"""

from __future__ import annotations

from collections.abc import Sequence


def mean_acceptance_length(num_drafts: int, num_accepted_tokens: int) -> float | None:
    """Tokens per verified block, the bonus token included; None if nothing was drafted.

    Args:
        num_drafts: blocks that were verified.
        num_accepted_tokens: drafts accepted in them, bonus tokens not counted.
    """
    return 1.0 + num_accepted_tokens / num_drafts if num_drafts else None


def expected_acceptance_length(survival: Sequence[float], rows: int) -> float:
    """The mean acceptance length (tau) to expect of blocks of rows - 1 drafts; 1 of no draft.

    Args:
        survival: survival[i] is how likely drafts 0..i are all accepted.
    """
    return 1.0 + sum(survival[: rows - 1])


def acceptance_by_position(histogram: Sequence[int]) -> list[float]:
    """Of all verified blocks, in what share draft 1, 2, ... was accepted; empty if nothing was drafted.

    Args:
        histogram: histogram[a] counts blocks of which `a` drafts were accepted.
    """
    blocks = sum(histogram)
    return [sum(histogram[i:]) / blocks for i in range(1, len(histogram))] if blocks else []
