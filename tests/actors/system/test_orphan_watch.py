"""A process whose parent was killed ends once it is idle."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from support.engines.ray_engines import alive
from support.waiting import wait_until

_CHILD = """
import sys, time
from pathlib import Path
from manta.actors.system import orphan_watch
orphan_watch.POLL_S = orphan_watch.REPLACED_S = 0.05
orphan_watch.end_with_raylet(Path(sys.argv[1]).exists)
print("watches", flush=True)
time.sleep(600)
"""
_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_whose_parent_was_killed_ends_once_it_is_idle(tmp_path: Path) -> None:
    idle = tmp_path / "idle"
    command = [sys.executable, "-c", _PARENT, _CHILD, str(idle)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.3)
        assert alive(child), "its parent lives"
        parent.kill()
    time.sleep(0.3)
    assert alive(child), "it has clients"
    idle.touch()
    wait_until(lambda: not alive(child))
