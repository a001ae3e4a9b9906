"""The draft lengths that are considered, and the classes of load for which one is chosen."""

from __future__ import annotations

import math


def draft_lengths(max_drafts: int) -> tuple[int, ...]:
    """Return the draft lengths that are considered: 0, 1, 3, 5, 7, 11, 15, 23, .. and `max_drafts`.

    Including its known token, a request then has 1, 2, 4, 6, 8, 12, 16, 24, .. rows; a GPU has graphs for
    these.
    """
    rows = {1, *(base << n for base in (2, 6) for n in range(max_drafts.bit_length()))}
    return tuple(sorted({*(count - 1 for count in rows if count <= max_drafts), max_drafts}))


def load_class(num_requests: int) -> int:
    """Return the class of a number of requests: one class each up to 8, then classes about a fifth wide."""
    return round(4 * math.log2(max(num_requests, 1)))
