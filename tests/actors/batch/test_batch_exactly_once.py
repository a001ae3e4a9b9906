"""Exactly-once rows as a property: processes die between any two operations on the output.

A driver and its writers work on an output that ends any of them at any operation, as SIGKILL does; abandoned
writers continue to write; runs follow each other, some over a changed input. At the end every row is there
once, and durable rows were never answered again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from manta.actors.batch.dataset.row_requests import id_hash
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger import ledger as ledgers
from manta.actors.batch.ledger import row_writer as writers
from manta.actors.batch.ledger.ledger import Ledger
from manta.actors.batch.ledger.output_parts import part_of
from manta.actors.batch.ledger.row_writer import RowWriter
from manta.actors.system.atomic_files import TEMPORARY
from manta.cluster.batch.row_ranges import RowRanges, difference, iterate_rows, union
from manta.cluster.errors import OutputError
from pyarrow import fs
from support.jobs.batch_outputs import form, manifest, numbers_in, parts, result, rows_in, spec

EXAMPLES = int(os.environ.get("MANTA_EXAMPLES", "10"))
NUM_ROWS = 60
ROWS_PER_SHARD = 8
Done = TypeVar("Done")


class Killed(BaseException):
    """Raised in place of the process's death."""


@dataclass(frozen=True, slots=True)
class MortalStorage(Storage):
    """An output as one process sees it: the process dies, or another runs, before an operation."""

    fate: list[Callable[[], None] | None] = field(default_factory=list, compare=False)

    def _live(self, name: str = "", content: bytes | pa.Buffer = b"") -> None:
        if not self.fate:
            return
        happens = self.fate.pop(0)
        if happens is not None:
            self.fate.clear()
            if self.local and name:
                half = Path(self.path(name)).with_name(f"{TEMPORARY}{Path(name).name}")
                if half.parent.is_dir():
                    half.write_bytes(memoryview(content)[: len(content) // 2])
            happens()

    def entries(self, *args: Any, **kwargs: Any) -> Any:
        self._live()
        return Storage.entries(self, *args, **kwargs)

    def read(self, name: str) -> bytes:
        self._live()
        return Storage.read(self, name)

    def write(self, name: str, content: Any, *, synced: bool = True) -> str:
        self._live(name, content)
        return Storage.write(self, name, content, synced=synced)

    def remove(self, *names: str) -> None:
        for name in names:
            self._live()
            Storage.remove(self, name)

    def remove_folder(self, name: str) -> None:
        for entry in Storage.entries(self, name, recursive=True):
            self.remove(entry.name)
        self._live()
        Storage.remove_folder(self, name)


def die() -> None:
    raise Killed


KILLS = st.none() | st.integers(0, 6) | st.integers(0, 30)


@dataclass
class Engine:
    """A writer, and its rows that are not durable yet."""

    name: str
    output: MortalStorage
    writer: RowWriter
    leased: set[int] = field(default_factory=set)


class Job(RuleBasedStateMachine):
    """The driver tracks rows in a set; leases have their own tests."""

    format: Any = "jsonl"
    ordered = False
    local = True

    @initialize()
    def begin(self) -> None:
        self.form = form(self.format, ordered=self.ordered)
        if self.local:
            self.folder = tempfile.TemporaryDirectory(prefix="manta-once-")
            self.storage = Storage.open(self.folder.name, field="output")
        else:
            files = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
            self.storage = Storage("memory", files, f"/{uuid.uuid4().hex}")
        self.ids = list(range(NUM_ROWS))  # of the input's rows, by row number
        self.version = 0
        self.engines: list[Engine] = []
        self.zombies: list[Engine] = []
        self.durable: set[int] = set()  # ids that were reported to the driver
        self.output = self.mortal()
        self.open(kill=None, retry=False)

    def mortal(self) -> MortalStorage:
        return MortalStorage(self.storage.where, self.storage.filesystem, self.storage.root)

    def open(self, kill: int | None, *, retry: bool, force: bool = False) -> bool:
        """Begin a run as the driver, unless it is killed meanwhile."""
        self.output = self.mortal()
        self.output.fate[:] = [] if kill is None else [None] * kill + [die]
        changed = {"name": "rows.jsonl", "size": 1000 + self.version, "modified": 1.0}
        job = spec(len(self.ids), self.form, input=[changed])
        hashes = np.array([id_hash(f"id-{each}") for each in self.ids], dtype=np.uint64)
        try:
            self.ledger = Ledger.open(
                self.output, job, resume="force" if force else "yes", id_hashes=lambda: hashes
            )
            if self.ledger.complete and retry:
                self.ledger.reopen()
            for orphan in self.ledger.orphans:
                self.durable |= self.ids_of(
                    difference(self.ledger.durable(orphan), self.ledger.already_merged(orphan))
                )
        except Killed:
            self.ledger.close()  # as the system does
            return False
        finally:
            self.output.fate.clear()
        assert self.ledger.complete == (self.storage.entry("_SUCCESS") is not None)
        waiting = (self.ledger.durable(orphan) for orphan in self.ledger.orphans)
        done = union(self.ledger.answered, *waiting, () if retry else self.ledger.failed)
        self.left = set(iterate_rows(difference(((0, len(self.ids)),), done)))
        self.durable &= set(self.ids)
        again = {self.ids[row] for row in self.left} & self.durable
        failed = self.ids_of(self.ledger.failed)
        assert again <= (failed if retry else set()), "what was durable is answered again"
        self.to_adopt = list(self.ledger.orphans)
        return True

    def ids_of(self, rows: RowRanges) -> set[int]:
        return {self.ids[row] for row in iterate_rows(rows)}

    @precondition(lambda self: not self.ledger.complete and len(self.engines) < 3)
    @rule()
    def start_engine(self) -> None:
        name, output = uuid.uuid4().hex, self.mortal()
        shard = len(self.engines)
        writer = RowWriter(output, self.form, run=self.ledger.run, shard=shard, writer=name)
        self.engines.append(Engine(name, output, writer))

    @precondition(lambda self: self.engines and self.left)
    @rule(data=st.data(), num_rows=st.integers(1, 12))
    def answer(self, data: st.DataObject, num_rows: int) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        rows = data.draw(st.permutations(sorted(self.left)))[:num_rows]
        failed = data.draw(st.sets(st.sampled_from(rows), max_size=3))
        self.give(engine, rows, failed)

    def give(self, engine: Engine, rows: Iterable[int], failed: Collection[int]) -> None:
        for row in rows:
            self.left.remove(row)
            engine.leased.add(row)
            given = result(self.ids[row], failed=row in failed) | {"row": row}
            engine.writer.add([given], shard=row // ROWS_PER_SHARD if self.ordered else None)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), kill=KILLS, what=st.sampled_from(["flush", "flush", "adopt", "close", "end_shard"]))
    def work(self, data: st.DataObject, kill: int | None, what: str) -> None:
        """Write as an engine, which may be killed meanwhile."""
        engine = data.draw(st.sampled_from(self.engines))
        engine.output.fate[:] = [] if kill is None else [None] * kill + [die]
        try:
            if what == "adopt" and self.to_adopt:
                orphan = data.draw(st.sampled_from(self.to_adopt))
                engine.writer.take_over(orphan, self.ledger.already_merged(orphan))
                self.to_adopt.remove(orphan)
            elif what == "end_shard":
                engine.writer.end_shard(data.draw(st.integers(0, NUM_ROWS // ROWS_PER_SHARD)))
            elif what == "close":
                self.learn(engine, engine.writer.close())
                self.engines.remove(engine)
            else:
                self.learn(engine, engine.writer.flush())
        except Killed:
            self.engines.remove(engine)
            self.replace_engine(engine)
        engine.output.fate.clear()

    def learn(self, engine: Engine, rows: RowRanges) -> None:
        assert set(iterate_rows(rows)) <= engine.leased, "only what was added is made durable"
        engine.leased -= set(iterate_rows(rows))
        self.durable |= self.ids_of(rows)

    def replace_engine(self, engine: Engine) -> None:
        """Give an engine up as the driver: its rows that are not durable must be answered again."""
        self.ledger.refresh(engine.name)
        durable = set(iterate_rows(self.ledger.durable(engine.name)))
        self.durable |= {self.ids[row] for row in durable & engine.leased}
        self.left |= engine.leased - durable
        if engine.name in self.ledger.orphans:
            self.to_adopt.append(engine.name)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Give up an engine that still lives."""
        engine = data.draw(st.sampled_from(self.engines))
        self.engines.remove(engine)
        self.zombies.append(engine)
        self.replace_engine(engine)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), pause=st.integers(0, 10))
    def pause(self, data: st.DataObject, pause: int) -> None:
        """Pause an engine between two operations, give it up meanwhile, and let it continue."""
        engine = data.draw(st.sampled_from(self.engines))
        gone = [False]

        def given_up() -> None:
            gone[0] = True
            self.engines.remove(engine)
            self.replace_engine(engine)
            for other in self.engines:
                if engine.name in self.to_adopt:
                    other.writer.take_over(engine.name, self.ledger.already_merged(engine.name))
                    self.to_adopt.remove(engine.name)

        engine.output.fate[:] = [None] * pause + [given_up]
        rows = engine.writer.flush()
        engine.output.fate.clear()
        if not gone[0]:
            self.learn(engine, rows)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), what=st.sampled_from(["flush", "close"]), kill=KILLS)
    def haunt(self, data: st.DataObject, what: str, kill: int | None) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        zombie.output.fate[:] = [] if kill is None else [None] * kill + [die]
        try:
            getattr(zombie.writer, what)()
        except (Killed, OutputError):
            self.zombies.remove(zombie)
        zombie.output.fate.clear()

    @rule(
        kill=KILLS,
        retry=st.booleans(),
        change=st.sampled_from([None, None, "append", "shuffle", "drop"]),
        haunting=st.booleans(),
        data=st.data(),
    )
    def kill_driver(
        self, kill: int | None, retry: bool, change: str | None, haunting: bool, data: st.DataObject
    ) -> None:
        """Kill the driver, with or without its engines, and run the job again until it succeeds."""
        self.ledger.close()  # as the system does
        self.zombies += self.engines if haunting else []
        self.engines = []
        if change is not None:
            self.version += 1
            self.ids = self.changed(change, data)
        force = change is not None
        if not self.open(kill, retry=retry, force=force):
            assert self.open(None, retry=retry, force=force)

    def changed(self, change: str, data: st.DataObject) -> list[int]:
        if change == "append":
            return [*self.ids, *range(max(self.ids) + 1, max(self.ids) + 4)]
        if change == "shuffle":
            return data.draw(st.permutations(self.ids))
        return self.ids[3:]

    @precondition(lambda self: not self.ledger.complete and len(self.left) < NUM_ROWS // 2)
    @rule(kill=KILLS)
    def finish(self, kill: int | None) -> None:
        """Answer all remaining rows and end the job, in its next run if it is killed."""
        if self.left and not self.engines:
            self.start_engine()
        if self.left:
            self.give(self.engines[0], sorted(self.left), failed=range(0, NUM_ROWS, 7))
        for engine in self.engines:
            self.learn(engine, engine.writer.close())
        self.engines = []
        self.output.fate[:] = [] if kill is None else [None] * kill + [die]
        try:
            self.ledger.finish({"rows": 1})
        except Killed:
            self.output.fate.clear()
            self.ledger.close()
            self.open(None, retry=False)
            assert not self.left
            if not self.ledger.complete:
                self.ledger.finish({"rows": 1})
        self.output.fate.clear()
        self.ledger.close()
        self.check()
        assert not Storage.entries(self.storage, "_manta/pending", recursive=True)
        self.open(None, retry=False)
        assert self.ledger.complete

    def check(self) -> None:
        """Check that every row is there once, in all result-like files and in those of the manifest."""
        names = parts(self.storage)
        assert sorted(numbers_in(self.storage, names)) == sorted(self.ids)
        assert sorted(part["file"] for part in manifest(self.storage)["parts"]) == names
        records = {part_of(entry.name) for entry in self.storage.entries("_manta/records")}
        assert records == set(names)
        failed = [row for row in rows_in(self.storage, names) if row["error"]]
        assert len(failed) == manifest(self.storage)["failed"]
        if self.ordered:
            for kind in ("part-", "_errors/"):
                rows = numbers_in(self.storage, [name for name in names if name.startswith(kind)])
                numbers = [self.ids.index(row) for row in rows]
                assert numbers == sorted(numbers)

    def teardown(self) -> None:
        if not self.ledger.complete:
            self.finish(None)
        self.ledger.close()
        for zombie in self.zombies:
            with contextlib.suppress(OutputError):
                zombie.writer.close()
        self.check()
        if self.local:
            self.folder.cleanup()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("local", [True, False], ids=["disk", "objects"])
@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
def test_every_row_is_written_once_whatever_dies_and_durable_rows_are_not_answered_again(
    local: bool, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "ROWS_PER_PART", 6)
    monkeypatch.setattr(writers, "RETRY_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    if not local:
        monkeypatch.setattr(ledgers, "lock", lambda *_: FreeLock())
    changes = {"local": local, "ordered": ordered, "format": "jsonl" if local else "parquet"}
    machine = type("Job", (Job,), changes)
    how = settings(max_examples=EXAMPLES, stateful_step_count=30, phases=[Phase.reuse, Phase.generate])
    run_state_machine_as_test(machine, settings=how)  # shrinking takes minutes; thirty steps can be read


class FreeLock:
    """A lock without contention: `test_batch_lock.py` tests that two jobs do not share an output."""

    is_held = True

    def close(self) -> None: ...
