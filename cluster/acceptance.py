"""Mean acceptance length: the tokens that a verified block of drafts yields, in one formula and one name.

The *mean acceptance length* is vLLM's: 1 + accepted drafts / verified blocks. The 1 is the bonus token, which
the target adds to every block. A block is what one request has verified in one step (vLLM's `num_drafts`,
also a request's `num_steps` here). Without drafts the length is undefined: None, null in JSON, "-" in tables.
"""

from __future__ import annotations

from collections.abc import Sequence


def mean_acceptance_length(num_drafts: int, num_accepted_tokens: int) -> float | None:
    """Return the tokens per verified block, including the bonus token; None if nothing was drafted.

    Args:
        num_drafts: verified blocks.
        num_accepted_tokens: drafts accepted in them, without bonus tokens.
    """
    return 1.0 + num_accepted_tokens / num_drafts if num_drafts else None


def expected_acceptance_length(survival: Sequence[float], rows: int) -> float:
    """Return the expected acceptance length (tau) of blocks of rows - 1 drafts; 1 without drafts.

    Args:
        survival: survival[i] is the probability that drafts 0..i are all accepted.
    """
    return 1.0 + sum(survival[: rows - 1])


def acceptance_by_position(histogram: Sequence[int]) -> list[float]:
    """Return the share of verified blocks in which draft 1, 2, ... was accepted; empty if nothing was
    drafted.

    Args:
        histogram: histogram[a] counts blocks with `a` accepted drafts.
    """
    blocks = sum(histogram)
    return [sum(histogram[i:]) / blocks for i in range(1, len(histogram))] if blocks else []
