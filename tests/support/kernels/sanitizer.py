"""A sanitizer for kernels in Triton's interpreter: accesses out of bounds, and races.

The interpreter runs one program after the other and each operation for all threads at once, so tests of
values pass without barriers and with relaxed atomics. Here a launch's accesses are recorded and judged:

    bounds      each access lies within the memory of one of the launch's arguments
    programs    two programs access an address, one of them to write, and no atomics order them (by vector
                clocks: a release hands on what all threads did before the last barrier)
    threads     within a program, other elements of a tensor access an address and no barrier is between them,
                or the same element does in a tensor so small that several warps may hold each element

Which thread has an element is decided by compiled layouts, which give a thread up to 16 bytes of a row. Two
accesses by the same element of a larger tensor are taken to be by the same thread, and a single warp's to be
in their order.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from triton.runtime import interpreter

from ..paths import ROOT

Addresses = npt.NDArray[np.uint64]
# A line of a kernel: the file, relative to the repository, and the line's number.
Line = tuple[str, int]
_BYTES_OF_A_THREAD, _WARP = 16, 32
# A file whose programs may store to one address: the slot of rows that are skipped, which nothing reads.
_SKIPS = "drafter/compute/gpu_triton/attention/norm_rope_kv_write.py"
_SAME_ACCESSES = 4000  # of one launch: sets of accesses to an address that are compared


class Access(NamedTuple):
    """What one operation of a program accesses: addresses in ascending order, and the element at each."""

    kind: str  # "load", "store" or "atomic"
    addresses: Addresses
    elements: npt.NDArray[np.int64]
    num_elements: int
    size: int  # of an element, in bytes
    line: Line
    semantics: str = ""  # of an atomic

    def is_held_once(self, num_threads: int) -> bool:
        """Return whether each element is surely held by one of these threads alone."""
        return self.num_elements * self.size >= num_threads * _BYTES_OF_A_THREAD


class Barrier(NamedTuple):
    line: Line


@dataclass(slots=True)
class Launch:
    """The recorded operations of a launch, by program."""

    kernel: str
    num_threads: int
    storages: list[tuple[int, int]]  # begin and end of the arguments' memory, ascending
    programs: list[list[Access | Barrier]] = field(default_factory=list[list[Access | Barrier]])
    out_of_bounds: Counter[str] = field(default_factory=Counter[str])

    def record(self, kind: str, pointers: Any, mask: Any, size: int, semantics: str = "") -> None:
        pointers = np.asarray(pointers)
        keep = np.broadcast_to(np.asarray(mask, dtype=bool), pointers.shape).ravel()
        elements = np.flatnonzero(keep)
        if not len(elements):
            return
        addresses = pointers.ravel().astype(np.uint64)[elements]
        line = _line()
        self._check_bounds(addresses, size, kind, line)
        order = np.argsort(addresses, kind="stable")
        access = Access(kind, addresses[order], elements[order], pointers.size, size, line, semantics)
        self.programs[-1].append(access)

    def _check_bounds(self, addresses: Addresses, size: int, kind: str, line: Line) -> None:
        starts = np.array([begin for begin, _ in self.storages], dtype=np.uint64)
        ends = np.array([end for _, end in self.storages], dtype=np.uint64)
        at = np.searchsorted(starts, addresses, side="right") - 1
        is_outside = (at < 0) | (addresses + np.uint64(size) > ends[np.maximum(at, 0)])
        if count := int(is_outside.sum()):
            self.out_of_bounds[f"{_a(kind)} of {count} elements out of bounds at {_said(line)}"] += 1

    def keep_written(self) -> None:
        """Forget loads from addresses that the launch does not write: they are in no race."""
        steps = [step for program in self.programs for step in program if isinstance(step, Access)]
        stores = [step.addresses for step in steps if step.kind != "load"]
        written = np.unique(np.concatenate([*stores, np.empty(0, dtype=np.uint64)]))
        for program in self.programs:
            kept = (_written(step, written) if isinstance(step, Access) else step for step in program)
            program[:] = [step for step in kept if isinstance(step, Barrier) or len(step.addresses)]

    def findings(self, without: Line | None = None, *, strict: bool = False) -> list[str]:
        """Return a sentence for each fault.

        Args:
            without: a line whose barriers are left out, and whose atomics are relaxed.
            strict: whether the threads of a kernel's only warp are in no order, either.
        """
        num_threads = self.num_threads if strict or self.num_threads > _WARP else 0
        clocks = _Clocks()
        found: dict[str, None] = dict.fromkeys(self.out_of_bounds)
        for number, program in enumerate(self.programs):
            found |= dict.fromkeys(_judge_threads(program, num_threads, without))
            clocks.run(number, program, without)
        found |= dict.fromkeys(clocks.races())
        return [f"{self.kernel}: {each}" for each in found]

    def orders(self) -> set[Line]:
        """Return the lines of barriers and of atomics that order accesses."""
        steps = [step for program in self.programs for step in program]
        return {step.line for step in steps if isinstance(step, Barrier) or _is_ordering(step)}


def _written(step: Access, written: Addresses) -> Access:
    if step.kind != "load":
        return step
    if not len(written):
        return step._replace(addresses=written)
    at = np.minimum(np.searchsorted(written, step.addresses), len(written) - 1)
    keep = written[at] == step.addresses
    return step._replace(addresses=step.addresses[keep], elements=step.elements[keep])


def _is_ordering(step: Access) -> bool:
    return "ACQ" in step.semantics or "RELEASE" in step.semantics


def _judge_threads(
    program: Iterable[Access | Barrier], num_threads: int, without: Line | None
) -> Iterator[str]:
    """Yield accesses of one address by two threads of a program that no barrier separates."""
    phase: list[Access] = []
    for step in program:
        if isinstance(step, Barrier):
            phase = phase if step.line == without else []
        elif step.kind == "atomic":
            continue  # its result reaches all threads, and one thread makes it
        else:
            clashes = _clashes(phase, step, num_threads)
            yield from (f"{each}, with no barrier between them" for each in clashes)
            phase.append(step)


def _clashes(phase: Iterable[Access], step: Access, num_threads: int) -> Iterator[str]:
    if step.kind == "store" and (np.diff(step.addresses) == 0).any():
        yield f"a store of several elements to one address at {_said(step.line)}"
    for other in phase:
        if step.kind == other.kind == "load":
            continue
        if other.addresses[-1] < step.addresses[0] or step.addresses[-1] < other.addresses[0]:
            continue
        at = np.minimum(np.searchsorted(other.addresses, step.addresses), len(other.addresses) - 1)
        hit = other.addresses[at] == step.addresses
        elements = other.elements[at[hit]], step.elements[hit]
        if hit.any() and not _by_one_thread(other, step, *elements, num_threads):
            yield f"{_a(other.kind)} at {_said(other.line)}, then {_a(step.kind)} at {_said(step.line)}"


def _by_one_thread(first: Access, second: Access, one: Any, other: Any, num_threads: int) -> bool:
    """Return whether two accesses to the same addresses, by these elements, are by the same threads."""
    if first.num_elements != second.num_elements or not (one == other).all():
        return False
    # One of the threads that hold an element makes its stores. What others load on its line is only stored.
    if first.kind == second.kind or first.line == second.line:
        return True
    return first.is_held_once(num_threads) and second.is_held_once(num_threads)


class _Clocks:
    """Vector clocks of the programs of a launch, and what each accessed at which time of its own."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, int], dict[int, int]] = {}  # by program and epoch
        self._released: dict[int, dict[int, int]] = {}  # by address
        # Program, its epoch, the epoch whose release publishes the access, and the access.
        self._accesses: list[tuple[int, int, int, Access]] = []

    def run(self, number: int, program: Iterable[Access | Barrier], without: Line | None) -> None:
        clock, epoch = {number: 1}, 1
        self._at[number, 1] = dict(clock)
        for step in program:
            if isinstance(step, Access) and step.kind != "atomic":
                # One thread makes scalar stores and atomics, so that these are in order without a barrier.
                is_ordered = step.kind == "store" and step.num_elements == 1
                self._accesses.append((number, epoch, epoch - is_ordered, step))
                continue
            if isinstance(step, Access):
                self._accesses.append((number, epoch, epoch - 1, step))
                if step.line != without:
                    self._synchronize(number, epoch, clock, step)
            elif step.line == without:
                continue
            epoch += 1
            clock[number] = epoch
            self._at[number, epoch] = dict(clock)

    def _synchronize(self, number: int, epoch: int, clock: dict[int, int], atomic: Access) -> None:
        for address in atomic.addresses.tolist():
            before = self._released.get(address, {})
            if "ACQ" in atomic.semantics:
                for other, time in before.items():
                    clock[other] = max(clock.get(other, -1), time)
            if "REL" in atomic.semantics:
                mine = clock | {number: epoch - 1}  # what all threads did before the last barrier
                each = before.keys() | mine.keys()
                # Atomics on one address continue a release.
                self._released[address] = {p: max(before.get(p, -1), mine.get(p, -1)) for p in each}

    def races(self) -> Iterator[str]:
        lines = {(step.kind, step.line): None for *_, step in self._accesses}
        names, accesses = list(lines), self._accesses
        if not accesses:
            return
        rows = list[npt.NDArray[np.int64]]()
        for number, epoch, published, step in accesses:
            each = np.unique(step.addresses).astype(np.int64)
            row = np.empty((len(each), 5), dtype=np.int64)
            row[:, 0], row[:, 1:] = each, (number, epoch, published, names.index((step.kind, step.line)))
            rows.append(row)
        table = np.unique(np.concatenate(rows), axis=0)
        cuts = np.flatnonzero(np.diff(table[:, 0])) + 1
        first, last = np.concatenate(([0], cuts)), np.concatenate((cuts, [len(table)]))
        shared = np.flatnonzero(table[first, 1] != table[last - 1, 1])
        seen: set[bytes] = set()
        for place in shared.tolist():
            group = table[first[place] : last[place], 1:]
            if (key := group.tobytes()) not in seen and len(seen) < _SAME_ACCESSES:
                seen.add(key)
                yield from self._unordered(group.tolist(), names)

    def _unordered(self, group: list[list[int]], names: list[tuple[str, Line]]) -> Iterator[str]:
        for place, (one, now, published, what) in enumerate(group):
            for other, then, published_2, also in group[place + 1 :]:
                (kind, line), (kind_2, line_2) = names[what], names[also]
                if one == other or (kind == kind_2 and (kind != "store" or line[0] == line_2[0] == _SKIPS)):
                    continue
                is_before = self._at[other, then].get(one, -1) >= published
                if is_before or self._at[one, now].get(other, -1) >= published_2:
                    continue
                yield (
                    f"{_a(kind)} at {_said(line)} and {_a(kind_2)} at {_said(line_2)} by two programs, "
                    "which no atomic orders"
                )


def _a(kind: str) -> str:
    return f"an {kind}" if kind == "atomic" else f"a {kind}"


def _said(line: Line) -> str:
    return f"{line[0]}:{line[1]}"


def _line() -> Line:
    """Return the innermost line of a kernel that is being run."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_REPOSITORY) and not path.startswith((_HERE, _INSTALLED)):
            return path.removeprefix(_REPOSITORY), frame.f_lineno
        frame = frame.f_back
    raise AssertionError("a kernel makes each access")


_REPOSITORY = f"{ROOT}/"
_HERE, _INSTALLED = f"{Path(__file__).parent}/", f"{ROOT}/.venv/"


@dataclass
class Sanitizer:
    """Judges each launch that runs while it is installed.

    Attributes:
        findings: a sentence for each fault, with how often it was found.
        needed: by line of a barrier or ordering atomic that ran: whether any launch shows a fault without it.
            Only if `mutate` is set.
    """

    mutate: bool = False
    findings: Counter[str] = field(default_factory=Counter[str])
    needed: dict[Line, bool] = field(default_factory=lambda: defaultdict[Line, bool](bool))

    def judge(self, launch: Launch) -> None:
        launch.keep_written()
        found = launch.findings()
        self.findings.update(found)
        if not self.mutate:
            return
        found = launch.findings(strict=True)
        for line in launch.orders():
            self.needed[line] = self.needed[line] or launch.findings(line, strict=True) != found

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record the launches of Triton's interpreter."""
        here, operations = threading.local(), interpreter._interpreter
        executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
        run, begin, barrier = executor.__call__, builder.set_grid_idx, builder.create_barrier

        def launch(self_: Any, *args: Any, **kwargs: Any) -> Any:
            num_threads = _WARP * kwargs.get("num_warps", 4)
            here.launch = Launch(self_.fn.__name__, num_threads, _storages((args, kwargs)))
            try:
                return run(self_, *args, **kwargs)
            finally:
                done, here.launch = here.launch, None
                self.judge(done)

        def set_grid_idx(self_: Any, *index: int) -> None:
            begin(self_, *index)
            here.launch.programs.append([])

        def create_barrier(self_: Any) -> None:
            barrier(self_)
            here.launch.programs[-1].append(Barrier(_line()))

        recorded = _Recorded(operations, lambda: here.launch)
        with (
            patch.object(interpreter, "_interpreter", recorded),
            patch.object(executor, "__call__", launch),
            patch.object(builder, "set_grid_idx", set_grid_idx),
            patch.object(builder, "create_barrier", create_barrier),
        ):
            yield


class _Recorded:
    """The interpreter's operations on memory, which it calls by module."""

    def __init__(self, operations: Any, current: Callable[[], Launch]) -> None:
        self._operations, self._current = operations, current

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._current().record("load", pointers, mask, np.dtype(dtype).itemsize)
        return self._operations.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        self._current().record("store", pointers, mask, np.asarray(values).dtype.itemsize)
        return self._operations.store(pointers, values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, semantics: Any) -> Any:
        size = np.asarray(values).dtype.itemsize
        self._current().record("atomic", pointers, mask, size, str(semantics).upper())
        return self._operations.atomic_rmw(operation, pointers, values, mask, semantics)

    def atomic_cas(self, pointers: Any, compared: Any, values: Any, semantics: Any) -> Any:
        size = np.asarray(values).dtype.itemsize
        self._current().record("atomic", pointers, True, size, str(semantics).upper())
        return self._operations.atomic_cas(pointers, compared, values, semantics)


def _storages(arguments: Any) -> list[tuple[int, int]]:
    """Return begin and end of the memory of all tensors in nested arguments, ascending."""
    found, left = set[tuple[int, int]](), [arguments]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, tuple | list):
            left.extend(each)
        elif hasattr(each, "untyped_storage"):
            storage = each.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return sorted(found)
