"""Mean acceptance length: the tokens that a verified block of drafts yields.

The *mean acceptance length* is vLLM's: 1 + accepted drafts / verified blocks. The 1 is the bonus token, which
the target adds to every block. A block is what one request verifies in one step (vLLM's `num_drafts`, also a
request's `num_steps` here). Without drafts the length is undefined: None, null in JSON, "-" in tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..errors import ConfigError


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


def geometric_survival(acceptance: float, num_drafts: int) -> tuple[float, ...]:
    """Return the survival curve if each draft is accepted with the same probability, given those before it.

    Its expected acceptance length is equation (1) of Leviathan et al. (arXiv:2211.17192).
    """
    return tuple(acceptance**j for j in range(1, num_drafts + 1))


def survival_of_length(length: float, num_drafts: int) -> tuple[float, ...]:
    """Return the geometric survival curve with mean acceptance length `length`.

    Raises:
        ConfigError: blocks of `num_drafts` drafts cannot have that length.
    """
    if not 1.0 <= length <= num_drafts + 1:
        raise ConfigError(
            f"acceptance={length:g} must be a mean acceptance length from 1 to {num_drafts + 1}: the bonus "
            f"token, and at most {num_drafts} drafts.",
            param="acceptance",
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        survival = geometric_survival(middle, num_drafts)
        low, high = (middle, high) if 1.0 + sum(survival) < length else (low, middle)
    return geometric_survival(high, num_drafts)


def check_survival(survival: Sequence[float], num_drafts: int, *, param: str) -> None:
    """Raise ConfigError unless there is one probability per draft, and they never increase."""
    falls = all(after <= before for before, after in pairwise(survival))
    if len(survival) != num_drafts or not falls or not all(0.0 <= p <= 1.0 for p in survival):
        raise ConfigError(
            f"{param}={list(survival)} must be {num_drafts} probabilities, one per draft, that never rise: "
            "how likely each draft and all before it are accepted (vLLM's meaning).",
            param=param,
        )
