"""Python's cyclic garbage collector in a process that serves: `spare_streams`.

A collection of the oldest objects goes through all of them with every stream waiting: a tenth of a second
where thousands of answers with log probabilities are on their way. Nothing of a request is a cycle, so that
what is left of one is freed without the collector. Called by `replica.py` once it is ready.
"""

from __future__ import annotations

import gc

# Of a generation's collections for one of the next: Python's own is 10 for both. Some 7 million objects more
# than before must have come for one of the oldest.
_YOUNG, _MIDDLE = 10, 1000


def spare_streams() -> None:
    """What is there stays and is not looked at again; the oldest of what comes, seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _YOUNG, _MIDDLE)
