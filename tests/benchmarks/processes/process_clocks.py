"""CPU time and memory of this process and its descendants, by role.

Processes are identified by their command, as Ray and HAProxy name them. The role "ray" covers its daemons,
its agents, and Serve's controller and proxy. Linux only: empty on other systems. Used by `serve_tax.py`,
`soak_serve.py` and `soak_batch.py`; `process_tree.py` reads the processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manta.jobs.bench.common.idle_check import PROC, ticks_per_s

from .process_tree import descendants, read_processes

ROLES = ("client", "worker", "replica", "haproxy", "ray")
SERVER_MODULE = "serve_tax_server"  # the replica of the bare ASGI side
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class RoleClocks:
    """Role and CPU seconds so far, by process id."""

    seconds: Mapping[int, tuple[str, float]]

    def since(self, before: RoleClocks) -> dict[str, float]:
        """Return the CPU seconds between two readings for all of ROLES."""
        spent: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        for pid, (role, now_s) in self.seconds.items():
            spent[role] += now_s - before.seconds.get(pid, (role, 0.0))[1]
        return spent


def read_role_clocks(proc: Path = PROC) -> RoleClocks:
    if not (proc / "stat").exists():
        return RoleClocks({})
    processes = read_processes(proc)
    return RoleClocks(
        {
            pid: (role_of(pid, command_of(proc, pid)), processes[pid].own_ticks / ticks_per_s())
            for pid in (os.getpid(), *descendants(processes))
        }
    )


def resident_bytes(proc: Path = PROC) -> dict[str, int]:
    """Return the resident memory for all of ROLES."""
    found: dict[str, int] = dict.fromkeys(ROLES, 0)
    for pid, (role, _) in read_role_clocks(proc).seconds.items():
        try:
            found[role] += int((proc / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
        except OSError:  # the process has ended
            continue
    return found


def role_of(pid: int, command: str) -> str:
    if pid == os.getpid():
        return "client"
    program = command.split(" ", 1)[0]
    if "TargetWorker" in program or "DrafterWorker" in program:
        return "worker"
    if program.startswith("ray::ServeReplica") or SERVER_MODULE in command:
        return "replica"
    return "haproxy" if Path(program).name == "haproxy" else "ray"


def command_of(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # the process has ended
        return ""
