"""Ends a process of Ray whose raylet has died.

Ray (2.60) ends workers that call their raylet and get no answer. An actor that only serves sockets makes no
such call, so it would stay on the node for ever, next to the one that replaces it elsewhere. It may still
have clients: those keep it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

POLL_S = 2.0
# Ray takes some 15 s to notice that a node is dead; until its actors are replaced, these ones serve.
REPLACED_S = 30.0


def end_with_raylet(is_idle: Callable[[], bool]) -> None:
    """End this process some time after its parent, once it is idle. Returns at once."""
    threading.Thread(target=_watch, args=(os.getppid(), is_idle), name="manta-orphan", daemon=True).start()


def _watch(parent: int, is_idle: Callable[[], bool]) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    time.sleep(REPLACED_S)
    while not is_idle():
        time.sleep(POLL_S)
    logger.warning("the raylet of this process died: it ends")
    os._exit(0)
