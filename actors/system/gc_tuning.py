"""Settings of Python in a process that serves, so that no stream waits long: `spare_streams`.

A collection of the oldest objects goes through all of them with every stream waiting: a tenth of a second
where thousands of answers with log probabilities are on their way. Nothing of a request is a cycle, so that
what is left of one is freed without the collector.

The event loop gives Python's lock away at each call of the system. Beside a thread that computes it gets it
back after the switch interval, 5 ms by default: ten writes to clients in a turn would take 50 ms.

Called by `actors/replica.py` and `gateway/deployment.py` once they are ready.
"""

from __future__ import annotations

import gc
import sys

_SWITCH_INTERVAL_S = 0.001
# Of a generation's collections for one of the next: Python's own is 10 for both. Some 7 million objects more
# than before must have come for one of the oldest.
_YOUNG, _MIDDLE = 10, 1000


def spare_streams() -> None:
    """Freeze the objects that are there, look seldom at the oldest of later ones, and switch threads soon."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _YOUNG, _MIDDLE)
