"""A server in its own process, to be killed: python served_process.py '<engine and server settings>'.

Prints its address when it answers.
"""

from __future__ import annotations

import json
import signal
import sys

from manta.actors.http.config.settings_mapping import split_settings

from support.checkpoints.text_pair import LiveServer

if __name__ == "__main__":
    with LiveServer(*split_settings(json.loads(sys.argv[1]))) as server:
        print(server.url, flush=True)
        signal.pause()
