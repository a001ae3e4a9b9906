"""Where a text repeats itself: easy to draft, so it is reported apart and not taught further."""

from collections.abc import Sequence

import numpy as np

REPEAT_TOKENS = 8


def repeated_tokens(answer: Sequence[int]) -> np.ndarray:
    """bool [tokens]: inside an 8-gram that occurred earlier in the answer."""
    repeated, seen = np.zeros(len(answer), dtype=bool), set[tuple[int, ...]]()
    for start in range(len(answer) - REPEAT_TOKENS + 1):
        gram = tuple(answer[start : start + REPEAT_TOKENS])
        if gram in seen:
            repeated[start : start + REPEAT_TOKENS] = True
        seen.add(gram)
    return repeated


def before_repetition(answer: Sequence[int]) -> list[int]:
    """The answer up to its first repeated 8-gram; all of it if it has none."""
    repeated = repeated_tokens(answer)
    return list(answer[: int(repeated.argmax())] if repeated.any() else answer)
