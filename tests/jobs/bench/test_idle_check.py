"""CPU time of other processes is distinguished from our own; without data there is no warning.

Processes really compute here, and only sums of clocks are compared, so nothing depends on their speed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.processes.busy_processes import busy_processes
from benchmarks.processes.cpu_quota import quota_group
from benchmarks.processes.process_tree import TreeWatch
from manta.actors.system.host_resources import ControlGroup
from manta.cluster.errors import ConfigError
from manta.jobs.bench.common.idle_check import IDLE_SHARE, Idleness, Watch, print_warning
from support.paths import TESTS

pytestmark = pytest.mark.quiet

TICKS_S = 0.1  # clocks of 10 ms, two readings, some processes
ORPHAN = """
import subprocess, sys
none = subprocess.DEVNULL
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=none, stdout=none, stderr=none)
print(busy.pid, flush=True)
"""
linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux tells; this is not Linux")


@contextmanager
def stranger() -> Iterator[int]:
    """Run a busy process that is no descendant of this one: its parent has ended."""
    made = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True, timeout=60
    )
    pid = int(made.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_it_took(pid: int, seconds: float) -> float:
    before = cpu_s(pid)
    deadline_s = time.monotonic() + 60
    while cpu_s(pid) - before < seconds:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return cpu_s(pid) - before


@linux
def test_cpu_time_of_unrelated_processes_counts_as_others() -> None:
    watch = Watch()
    with stranger() as pid, watch.open():
        taken_s = wait_until_it_took(pid, 0.4)
    found = watch.found
    assert found.others_s is not None
    assert found.others_s > taken_s - TICKS_S
    share = found.as_json()["others_share"]
    assert found.idle is False or share < IDLE_SHARE
    assert share == pytest.approx(found.others_s / found.seconds / found.cores, abs=1e-3)


@linux
def test_cpu_time_of_descendants_counts_as_own() -> None:
    watch = TreeWatch()
    with watch.open(), busy_processes(1) as (ended,):
        ended_s = wait_until_it_took(ended, 0.3)
    with busy_processes(1) as (living,), watch.open():
        living_s = wait_until_it_took(living, 0.3)
    assert watch.found.own_s is not None
    assert watch.found.own_s > ended_s + living_s - 2 * TICKS_S


@linux
def test_an_orphaned_descendant_counts_as_own() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN + "sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    watch = TreeWatch()
    try:
        with watch.open():
            parent.communicate(timeout=60)  # its input ends, and so does it
            taken_s = wait_until_it_took(pid, 0.3)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert watch.found.own_s is not None
    assert watch.found.own_s > taken_s - TICKS_S


@linux
def test_short_lived_orphans_count_as_own() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", "import sys\nsys.stdin.readline()" + ORPHAN + "sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    watch = TreeWatch(look_every_s=0.02)
    with watch.open():
        parent.stdin.write("\n")
        parent.stdin.flush()
        pid = int(parent.stdout.readline())
        time.sleep(0.1)  # it is seen while its parent lives
        parent.communicate(timeout=60)
        taken_s = wait_until_it_took(pid, 0.4)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").exists():
            time.sleep(0.01)
    assert watch.found.own_s is not None
    assert watch.found.own_s > taken_s - TICKS_S


@linux
def test_unreaped_children_count_as_own() -> None:
    script = (
        "import signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + ORPHAN + "sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    watch = TreeWatch(look_every_s=0.02)
    with watch.open(), subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        taken_s = wait_until_it_took(pid, 0.4)
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        parent.stdin.close()
    assert watch.found.own_s is not None
    assert watch.found.own_s > taken_s - TICKS_S


def test_the_warning_names_the_other_load(capsys: pytest.CaptureFixture[str]) -> None:
    idle = Idleness(seconds=10.0, cores=2, own_s=19.5, others_s=0.4, stolen_s=0.0, throttled_s=0.0)
    assert idle.idle is True and idle.sentence is None
    busy = Idleness(seconds=10.0, cores=2, own_s=10.0, others_s=8.6, stolen_s=1.2)
    assert busy.idle is False
    assert busy.sentence == (
        "The machine was not idle: other processes took 43 % and other virtual machines took 6 % of its CPU "
        "time during the measurement; only ratios of sides that alternated are meaningful."
    )
    held_up = Idleness(seconds=10.0, cores=2, own_s=10.0, others_s=0.0, stolen_s=0.0, throttled_s=4.0)
    assert held_up.idle is True
    assert held_up.sentence == "A CPU quota stopped this process for 4.0 s of 10.0 s."
    print_warning([idle.as_json(), held_up.as_json(), busy.as_json()])
    assert capsys.readouterr().out == f"{busy.sentence}\n"


def test_without_measurements_there_is_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch(proc=tmp_path / "nothing here")
    with watch.open():
        pass
    found = watch.found
    assert found.idle is None and found.sentence is None
    assert found.as_json() | {"seconds": 0.0} == {
        "idle": None,
        "warning": None,
        "own_share": None,
        "others_share": None,
        "stolen_share": None,
        "waited_share": None,
        "throttled_s": None,
        "seconds": 0.0,
    }
    print_warning([found.as_json()])
    assert capsys.readouterr().out == ""


def test_no_busy_process_remains_after_any_error() -> None:
    started: list[int] = []
    with pytest.raises(KeyboardInterrupt), busy_processes(2) as pids:
        started += pids
        for pid in pids:
            os.kill(pid, 0)
        raise KeyboardInterrupt
    assert len(set(started)) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_busy_process_ends_when_its_parent_is_killed() -> None:
    script = (
        "from benchmarks.processes.busy_processes import busy_processes\n"
        "import time\n"
        "with busy_processes(1) as (pid,):\n"
        "    print(pid, flush=True)\n"
        "    time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=TESTS)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=60)
    deadline_s = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


@linux
def test_a_cpu_quota_throttles_until_it_is_left() -> None:
    home = ControlGroup.of_this_process()
    try:
        with quota_group(0.25) as group, group.entered():
            inside = ControlGroup.of_this_process()
            assert inside is not None and home is not None
            before_s = inside.throttled_s()
            assert before_s is not None
            deadline_s = time.monotonic() + 60
            while inside.throttled_s() == before_s:  # computes, so it must be held up
                assert time.monotonic() < deadline_s
    except ConfigError as refused:
        pytest.skip(refused.message)
    assert inside.folder != home.folder and not inside.folder.exists()
    assert ControlGroup.of_this_process() == home
