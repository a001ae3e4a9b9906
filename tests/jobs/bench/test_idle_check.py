"""CPU time of other processes is distinguished from our own; without data there is no warning.

Processes really compute here, and only sums of clocks are compared, so nothing depends on their speed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.processes import process_tree
from benchmarks.processes.process_tree import TreeWatch
from manta.actors.system.host_resources import ControlGroup
from manta.jobs.bench.common.idle_check import IDLE_SHARE, Idleness, Watch, print_warning
from support.waiting import wait_until

TICKS_S = 0.1  # clocks of 10 ms, two readings, some processes
BUSY = [sys.executable, "-c", "while True: pass"]
# Starts a busy process, prints its id, and ends with its own input.
PARENT = f"""
import signal, subprocess, sys
none = subprocess.DEVNULL
busy = subprocess.Popen({BUSY}, stdin=none, stdout=none, stderr=none)
print(busy.pid, flush=True)
sys.stdin.read()
"""
REAPS_NONE = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
needs_proc = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat")


@contextmanager
def parent_of_busy(program: str = PARENT) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a process with a busy child; yield it and the child's id. Both have ended afterwards."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            yield parent, pid
        finally:
            end(pid)
            parent.stdin.close()


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended; one that nobody has waited for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def used_s(pid: int, least_s: float) -> float:
    """Return the CPU seconds of a process from now on, once they are at least `least_s`."""
    before_s = cpu_s(pid)
    wait_until(lambda: cpu_s(pid) - before_s >= least_s)
    return cpu_s(pid) - before_s


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each time that a watch has listed the machine's processes."""
    seen: list[None] = []
    read = process_tree.read_processes

    def counted(proc: Path) -> dict[int, process_tree.CpuProcess]:
        found = read(proc)
        seen.append(None)
        return found

    monkeypatch.setattr(process_tree, "read_processes", counted)
    return seen


@needs_proc
def test_cpu_time_of_unrelated_processes_counts_as_others() -> None:
    watch = Watch()  # does not look at children before they have ended, so this one is as good as a stranger
    with parent_of_busy() as (_, pid), watch.open():
        taken_s = used_s(pid, 0.4)
    found = watch.found
    assert found.others_s is not None and found.others_s > taken_s - TICKS_S
    share = found.as_json()["others_share"]
    assert found.idle is False or share < IDLE_SHARE
    assert share == pytest.approx(found.others_s / found.seconds / found.cores, abs=1e-3)


@needs_proc
def test_cpu_time_of_descendants_counts_as_own() -> None:
    watch = TreeWatch()
    with watch.open(), parent_of_busy() as (_, ended):
        ended_s = used_s(ended, 0.3)
    with parent_of_busy() as (_, living), watch.open():
        living_s = used_s(living, 0.3)
    assert watch.found.own_s is not None
    assert watch.found.own_s > ended_s + living_s - 2 * TICKS_S


@needs_proc
@pytest.mark.parametrize("is_ended", [False, True], ids=["alive at the end", "ended before"])
def test_an_orphaned_descendant_counts_as_own(is_ended: bool, looks: list[None]) -> None:
    watch = TreeWatch(look_every_s=0.02)
    with watch.open(), parent_of_busy() as (parent, pid):
        num_before = len(looks)
        wait_until(lambda: len(looks) > num_before + 1)  # it is seen while its parent lives
        parent.communicate(timeout=600)
        taken_s = used_s(pid, 0.4)
        if is_ended:
            num_before = len(looks)
            wait_until(lambda: len(looks) > num_before + 1)
            end(pid)
    assert watch.found.own_s is not None
    assert watch.found.own_s > taken_s - TICKS_S


@needs_proc
def test_children_that_their_parent_does_not_wait_for_count_as_own(looks: list[None]) -> None:
    watch = TreeWatch(look_every_s=0.02)
    with watch.open(), parent_of_busy(REAPS_NONE + PARENT) as (_, pid):
        taken_s = used_s(pid, 0.4)
        num_before = len(looks)
        wait_until(lambda: len(looks) > num_before + 1)
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
    found = watch.found.as_json()
    assert watch.found.sentence is None and found.pop("seconds") >= 0.0
    assert set(found.values()) == {None}
    print_warning([found])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("version", "statistics"),
    [(1, "nr_throttled 3\nthrottled_time 2500000000\n"), (2, "nr_throttled 3\nthrottled_usec 2500000\n")],
)
def test_throttled_time_is_summed_over_a_group_and_those_above(
    version: int, statistics: str, tmp_path: Path
) -> None:
    inner = tmp_path / "slice" / "job"
    inner.mkdir(parents=True)
    group = ControlGroup(inner, tmp_path, version)
    assert group.throttled_s() is None, "there is no quota"
    for folder in (inner, inner.parent):
        (folder / "cpu.stat").write_text(statistics)
    assert group.throttled_s() == 5.0
