"""Where a replica's and a gateway's log lines go."""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    """Ray keeps a process's stderr, and shows it to the driver; `sys.stderr` may be Serve's, who keeps it."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("manta")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
