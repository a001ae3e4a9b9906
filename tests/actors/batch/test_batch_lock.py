"""One job at a time writes an output: a file lock on a disk, claims in an object store."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger import output_lock as locks
from manta.actors.batch.ledger.ledger import Ledger
from manta.actors.batch.ledger.output_lock import Lock, LockClaim, lock
from manta.cluster.errors import ConfigError, OutputError
from support.jobs.batch_outputs import JobRuns, numbers_in, parts, results, spec
from support.jobs.s3_outputs import S3Server, s3_url

HOLD = """
import sys
from manta.actors.batch.ledger import output_lock as locks
from manta.actors.batch.dataset.storage import Storage
locks.HEARTBEAT_S = 1.0
held = locks.lock(Storage.open(sys.argv[1], field="output"), print)
print("held", flush=True)
sys.stdin.read()
"""


def hold(where: str) -> subprocess.Popen[str]:
    """Hold an output in another process until this one ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLD, where], text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def ignore(_: str) -> None: ...


def test_two_jobs_do_not_share_a_folder_and_a_killed_one_leaves_it_free_at_once(
    output: Storage, tmp_path: Path
) -> None:
    with hold(output.where) as other:
        for overwrite in (False, True):
            with pytest.raises(
                ConfigError, match=rf"another job \(process {other.pid} on .*, since 2"
            ) as refused:
                Ledger.open(output, spec(3), overwrite=overwrite)
            assert refused.value.param == "output"
        other.kill()
    ledger = Ledger.open(output, spec(3))
    ledger.close()
    ledger.close()
    assert not (tmp_path / "out/_manta/lock").exists()


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", Path("/proc/manta")):
        with pytest.raises(ConfigError, match=f"output: {path} cannot be written"):
            Ledger.open(Storage.open(str(path), field="output"), spec(3))


def take_turns(output: Storage, inside: Path, entered: Path) -> None:
    """Lock and release an output many times. Raises if another process holds it, too."""
    for _ in range(50):
        with suppress(ConfigError):
            held = lock(output, ignore)
            inside.touch(exist_ok=False)
            assert held.is_held
            with entered.open("a") as file:
                file.write(".")
            inside.unlink()
            held.close()


def test_only_one_of_many_processes_holds_a_folders_lock_at_a_time(output: Storage, tmp_path: Path) -> None:
    """The lock's file and folder are created and removed meanwhile."""
    files = (tmp_path / "inside", tmp_path / "entered")
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=take_turns, args=(output, *files)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert files[1].read_text()


@pytest.fixture
def where(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An output in the store with a claim that is rewritten every second, the store's resolution.

    A claim is not taken for dead while its process is only slow.
    """
    monkeypatch.setattr(locks, "HEARTBEAT_S", 1.0)
    monkeypatch.setattr(locks, "DEAD_S", 240.0)
    monkeypatch.setattr(locks, "POLL_S", 0.2)
    return s3_url(s3, "bucket")


def test_a_live_claim_refuses_others_and_a_dead_one_is_taken_over(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Storage.open(where, field="output")
    reported: list[str] = []
    with hold(where) as other:
        with pytest.raises(ConfigError, match=rf"another job \(process {other.pid} on ") as refused:
            lock(output, reported.append)
        assert refused.value.param == "output"
        assert "to see whether it lives" in reported[0]
        other.kill()
    monkeypatch.setattr(locks, "DEAD_S", 2.0)
    ours = lock(output, reported.append)
    assert (ours.is_held, len(reported)) == (True, 2)
    ours.close()
    assert not output.entries("_manta")


def test_at_most_one_of_several_simultaneous_claims_wins(where: str) -> None:
    output = Storage.open(where, field="output")

    def start(_: int) -> list[Lock]:
        try:
            return [lock(output, ignore)]
        except ConfigError:
            return []

    with ThreadPoolExecutor(3) as pool:
        held = list(itertools.chain.from_iterable(pool.map(start, range(3))))
    for each in held:
        each.close()
    assert len(held) <= 1
    assert not output.entries("_manta")


def test_a_claim_that_was_considered_dead_is_lost_and_its_job_does_not_finish(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Storage.open(where, field="output")
    before, after = JobRuns(output), JobRuns(output)
    slept = before.open(spec(4))
    assert isinstance(slept._lock, LockClaim)
    old = before.write("old", results([0, 1]), ends=False)
    slept._lock._closing.set()  # as a machine that was suspended: no beat, nothing given back
    slept._lock._beating.join()
    monkeypatch.setattr(locks, "DEAD_S", 2.0)
    heir = after.open(spec(4))
    with pytest.raises(OutputError, match="another job has taken"):
        slept.finish({})
    with pytest.raises(OutputError, match="not written by run 1 any more: run 2 writes it now"):
        old.close()
    new = after.writer("new")
    new.take_over("old", heir.already_merged("old"))
    new.add(results([2, 3]))
    new.close()
    heir.finish({})
    assert sorted(numbers_in(output, parts(output))) == [0, 1, 2, 3]
    assert after.open(spec(4)).complete
    after.close()
