"""Python settings for a serving process that keep stream latency low: `spare_streams`.

A collection of the oldest generation visits all objects while every stream waits: a tenth of a second with
thousands of responses with log probabilities in flight. Requests contain no reference cycles, so they are
freed without the collector.

The event loop releases the GIL at each system call. While another thread computes, it gets the GIL back only
after the switch interval, 5 ms by default: ten writes to clients would take 50 ms.

Called by `actors/replica.py` and `gateway/deployment.py` once they are ready.
"""

from __future__ import annotations

import gc
import sys

_SWITCH_INTERVAL_S = 0.001
# Collections of a generation per collection of the next; Python's default is 10 for both. The oldest
# generation is collected after about 7 million new objects.
_YOUNG, _MIDDLE = 10, 1000


def spare_streams() -> None:
    """Freeze all present objects, rarely collect the oldest others, and switch threads sooner."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _YOUNG, _MIDDLE)
