"""A server in its own process, to be killed.

    python served_process.py '<engine and server settings>' NUM_STEPS

Prints its address when it answers. Its engine runs NUM_STEPS steps, and then waits to be killed.
"""

from __future__ import annotations

import json
import signal
import sys

from manta.actors.http.config.settings_mapping import split_settings

from support.checkpoints.text_pair import LiveServer
from support.engines.pausable_executor import PausableExecutors

if __name__ == "__main__":
    executors = PausableExecutors()
    with LiveServer(*split_settings(json.loads(sys.argv[1])), executors.make) as server:
        executors[0].allow_steps(int(sys.argv[2]))
        print(server.url, flush=True)
        signal.pause()
