from __future__ import annotations

import random
import socket
import subprocess
import sys

from manta.actors.system.host_resources import free_port

ASK = """
import random
from manta.actors.system.host_resources import free_port
random.seed(0)
print(free_port())
"""


def port_of_a_process() -> int:
    return int(subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True).stdout)


def test_a_port_is_not_given_twice_before_it_is_used() -> None:
    """Processes draw the same numbers here, so the second would get the first's port."""
    state = random.getstate()
    random.seed(0)
    own = [free_port()]
    random.seed(0)
    own.append(free_port())
    random.setstate(state)
    other = port_of_a_process()
    assert len({*own, other}) == 3
    assert port_of_a_process() == other, "the port of a process that has ended is free again"


def test_a_port_that_is_used_at_another_address_is_not_free() -> None:
    port = port_of_a_process()
    with socket.create_server(("127.0.0.2", port)):
        assert port_of_a_process() != port
