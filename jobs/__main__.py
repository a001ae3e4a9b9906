"""The entry point of the command `manta`: a Ctrl-C while the command line is imported ends it quietly.

Python would print a traceback of the import. The command line itself handles signals
(`common/stop_signals.py`).
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a script that ignores Ctrl-C for its commands keeps it so
        signal.signal(signal.SIGINT, _exit_quietly)
    from .cli import main as run_command  # imported here, where a Ctrl-C is handled

    signal.signal(signal.SIGINT, before)
    run_command()


def _exit_quietly(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # an exception could be caught by a library that is being imported


if __name__ == "__main__":
    main()
