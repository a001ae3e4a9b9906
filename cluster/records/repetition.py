"""Where an answer begins to repeat itself: repetition is easy to draft, so acceptance is measured before it.

A token is *repeated* if it is inside an n-gram that occurred earlier in the same answer. n is 4, as in the
literature's seq-rep-4 (https://arxiv.org/abs/1908.04319). Longer n-grams miss loops with a counter
("Chat 16:", "Chat 17:") and ever deeper nesting, which small models write at temperature 0 (figures:
docs/measurements.md). All n tokens count as repeated, not only the last one, by which the repetition is
known: they are as easy to draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

REPEATED_TOKENS = 4  # the n of the n-grams


def repeated_tokens(answer: Sequence[int], num_tokens: int = REPEATED_TOKENS) -> npt.NDArray[np.bool_]:
    """Return bool [tokens]: whether each is inside an n-gram of `num_tokens` that occurred earlier."""
    repeated = np.zeros(len(answer), dtype=np.bool_)
    for start in _repetitions(answer, num_tokens):
        repeated[start : start + num_tokens] = True
    return repeated


def num_fresh_tokens(answer: Sequence[int], num_tokens: int = REPEATED_TOKENS) -> int:
    """Return how many tokens precede the first repeated one: all if the answer does not repeat itself."""
    return next(_repetitions(answer, num_tokens), len(answer))


def _repetitions(answer: Sequence[int], num_tokens: int) -> Iterator[int]:
    """Yield the indexes at which an n-gram begins that occurred earlier, in ascending order."""
    seen = set[tuple[int, ...]]()
    for start in range(len(answer) - num_tokens + 1):
        gram = tuple(answer[start : start + num_tokens])
        if gram in seen:
            yield start
        seen.add(gram)
