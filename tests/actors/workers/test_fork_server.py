"""Fork servers: what their workers inherit, when workers start otherwise, how servers end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks only on Linux")

OWNER = """
import json, sys, time
from manta.actors.workers.base.fork_server import ForkServer, Stages

def first():
    import colorsys

def of_errand():
    import fractions

def second():
    import wave

def third():
    import sched

def errand():
    return str(sorted({"colorsys", "fractions", "wave"} & set(sys.modules))).encode()

servers = ForkServer(
    Stages(first=first, errand=errand, of_errand=of_errand, second=second, third=third)
)
print(json.dumps([servers.worker_command(), servers.answer().decode()]), flush=True)
sys.stdin.read()
servers.close()
"""
WORKER = """
import json, os, sys
print(json.dumps({
    "main": __name__,
    "arguments": sys.argv[1:],
    "given": os.environ["GIVEN"],
    "left": os.environ["LEFT"],
    "directory": os.getcwd(),
    "imported": "colorsys" in sys.modules,
    "leads": os.getpgid(0) == os.getpid(),
    "random": __import__("random").random(),
}))
raise SystemExit(3)
"""
SETUP = "import sys; print('by Ray', *sys.argv[1:])"


class Owner:
    """A process with fork servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "worker.py").write_text(WORKER)
        (folder / "setup.py").write_text(SETUP)
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.command, self.answer = json.loads(self.process.stdout.readline())

    def start(self, *flags: str) -> str:
        process = subprocess.run(
            [*self.command, str(self.folder / "setup.py"), str(self.folder / "worker.py"), *flags],
            cwd=self.folder,
            env={**os.environ, "LEFT": "left"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert not process.stderr
        return process.stdout

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(tmp_path: Path):
    made = Owner(tmp_path)
    yield made
    made.close()


def context(**fields: object) -> tuple[str, str]:
    return f"--serialized-runtime-env-context={json.dumps(fields)}", "--language=PYTHON"


def test_a_worker_has_its_clients_environment_and_its_servers_imports(owner: Owner) -> None:
    reported = [json.loads(owner.start("--id=7", *context(env_vars={"GIVEN": "${LEFT}"}))) for _ in range(2)]
    assert owner.answer == "['colorsys', 'fractions']"
    assert reported[0].pop("random") != reported[1].pop("random")
    for each in reported:
        assert each == {
            "main": "__main__",
            "arguments": ["--id=7"],
            "given": "left",
            "left": "left",
            "directory": str(owner.folder),
            "imported": True,
            "leads": True,
        }


@pytest.mark.parametrize(
    "flags",
    [
        context(command_prefix=["nice"]),
        context(py_executable="/usr/bin/other"),
        ("--language=JAVA",),
    ],
)
def test_a_worker_with_its_own_program_starts_as_ray_starts_it(owner: Owner, flags: tuple[str, ...]) -> None:
    assert owner.start(*flags).split(maxsplit=3)[:2] == ["by", "Ray"]


def test_workers_start_as_ray_starts_them_when_no_server_is_left(owner: Owner) -> None:
    owner.process.communicate("")
    assert owner.start("--language=PYTHON").startswith("by Ray")
    assert not Path(owner.command[-1]).exists()


def test_an_errand_whose_owner_has_ended_writes_nothing() -> None:
    """As after Ctrl-C while a server starts."""
    program = """
import time
from manta.actors.workers.base.fork_server import ForkServer, Stages

def errand():
    time.sleep(1)
    return b"late" * 100_000

nothing = lambda: None
ForkServer(Stages(first=nothing, errand=errand, of_errand=nothing, second=nothing, third=None))
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True, timeout=600)
    assert ended.stderr == ""  # read until the last process that holds it has ended


def test_servers_end_when_their_owner_is_killed(owner: Owner) -> None:
    assert listening(owner)
    owner.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not listening(owner) and not Path(owner.command[-1]).parent.exists())


def listening(owner: Owner) -> bool:
    """Whether a server has a socket in the owner's folder."""
    return str(Path(owner.command[-1]).parent) in Path("/proc/net/unix").read_text()
