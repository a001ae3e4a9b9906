"""An explorer of all interleavings of threads that share memory, counters and barriers.

    explore(threads) ─▶ how many states there are, and the shortest way to a fault, if there is one

Threads are lists of operations, recorded from the product (`recorded_sums.py`, `recorded_transfers.py`).
A breadth-first search visits each reachable state once. Faults are:

    a race       two accesses of a place, one of them a write, that nothing orders (by vector clocks over
                 releases, acquires and barriers, so also what weaker memory than the search's could reorder)
    a version    a read finds another version than the one it is for
    a delivery   the result of a rank that has read something wrong is handed on
    a deadlock   threads are left, and none can run unless a process dies

Accesses of memory run as soon as their threads reach them: races are found whatever their order is, and
without races it makes no difference. So states differ in the order of signals and waits alone. Waits may run
as soon as they can, too (`waits_at_once`): a later one only knows of more.

A process may die between any two operations, with all its threads. A watcher may see this at any time later,
and ends the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Read(NamedTuple):
    """Reads a place; `version`: what must be there, None if anything may."""

    place: str
    version: int | None = None


class Write(NamedTuple):
    place: str
    version: int = 0


class Signal(NamedTuple):
    """Adds one to a counter; `releases`: waits that see it come after all that the thread knows of."""

    counter: str
    releases: bool = True


class Wait(NamedTuple):
    """Waits until a counter has at least this value; `gives_up`: or at any time goes on with what is there.

    It comes after the signals up to this value alone: that it sees later ones is not sure.
    """

    counter: str
    at_least: int
    acquires: bool = True
    gives_up: bool = False


class Meet(NamedTuple):
    """A barrier of all threads of its process."""

    number: int


class Deliver(NamedTuple):
    """Hands on what a process has computed."""

    process: str


Op = Read | Write | Signal | Wait | Meet | Deliver
Clock = tuple[int, ...]  # by thread: how many of its operations come before


@dataclass(frozen=True, slots=True)
class Thread:
    name: str
    process: str
    ops: Sequence[Op]


class Data(NamedTuple):
    """What was last done to a place: the thread and time of its write, and the time of each thread's read."""

    version: int | None
    writer: int
    written: int
    reads: Clock


class State(NamedTuple):
    """Attributes:
    places: how many operations each thread has done.
    released: what a wait for each counter learns.
    dead: processes that have died.
    wrong: processes that may have computed something wrong, after a wait that gave up.
    """

    places: Clock
    clocks: tuple[Clock, ...]
    released: tuple[tuple[Clock, ...], ...]
    data: tuple[Data, ...]
    dead: frozenset[str]
    wrong: frozenset[str]
    is_stopped: bool


class FoundError(Exception):
    """A fault of the program that is explored."""


@dataclass(frozen=True, slots=True)
class Explored:
    """Attributes:
    fault: None if no order has one.
    path: the operations before the fault, but for those that run at once.
    """

    num_states: int
    fault: str | None = None
    path: tuple[str, ...] = ()


@dataclass
class Explorer:
    """Explores threads.

    Args:
        mortal: processes of which one may die.
        watched: whether the death of a process is noticed.
        waits_at_once: whether a wait that can end does so before anything else.
    """

    threads: Sequence[Thread]
    mortal: frozenset[str] = frozenset()
    watched: bool = True
    waits_at_once: bool = False
    _counters: dict[str, int] = field(init=False)
    _places: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        ops = [op for thread in self.threads for op in thread.ops]
        counters = dict.fromkeys(op.counter for op in ops if isinstance(op, Signal | Wait))
        self._counters = {name: i for i, name in enumerate(counters)}
        places = dict.fromkeys(op.place for op in ops if isinstance(op, Read | Write))
        self._places = {name: i for i, name in enumerate(places)}

    def explore(self, max_states: int = 10**6) -> Explored:
        """Visit all states. Raises AssertionError if there are more than `max_states`."""
        none = (0,) * len(self.threads)
        first = State(
            none,
            (none,) * len(self.threads),
            ((),) * len(self._counters),
            (Data(None, 0, 0, none),) * len(self._places),
            frozenset(),
            frozenset(),
            False,
        )
        came_from: dict[State, tuple[State, str] | None] = {}
        state, label = first, "start"
        try:
            first = state = self._settled(first)
            came_from[first] = None
            queue = deque([first])
            while queue:
                assert len(came_from) <= max_states, "too many states"
                state, is_stuck, label = queue.popleft(), True, "no thread can run"
                for label, after in self._steps(state):
                    is_stuck = is_stuck and after.dead != state.dead
                    after = self._settled(after)
                    if after not in came_from:
                        came_from[after] = state, label
                        queue.append(after)
                if is_stuck and not state.is_stopped:
                    self._check_ended(state)
        except FoundError as fault:
            return Explored(len(came_from), str(fault), (*_path(state, came_from), label))
        return Explored(len(came_from))

    def _check_ended(self, state: State) -> None:
        left = [
            f"{thread.name} at {thread.ops[done]}"
            for thread, done in zip(self.threads, state.places, strict=True)
            if done < len(thread.ops) and thread.process not in state.dead
        ]
        if left:
            raise FoundError(f"a deadlock: {', '.join(left)}")

    def _next(self, state: State, number: int) -> Op | None:
        thread, done = self.threads[number], state.places[number]
        return thread.ops[done] if done < len(thread.ops) and thread.process not in state.dead else None

    def _can_end(self, state: State, op: Wait) -> bool:
        return len(state.released[self._counters[op.counter]]) >= op.at_least

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the states that may follow, with what happens before each."""
        if state.is_stopped:
            return
        for number, thread in enumerate(self.threads):
            op = self._next(state, number)
            if isinstance(op, Signal):
                yield f"{thread.name}: {op}", self._signal(state, number, op)
            elif isinstance(op, Wait):
                if self._can_end(state, op):
                    yield f"{thread.name}: {op}", self._wait(state, number, op)
                elif op.gives_up:
                    after = self._advanced(state, number)
                    yield f"{thread.name} gives up", after._replace(wrong=after.wrong | {thread.process})
        if not state.dead:
            for process in sorted(self.mortal):
                yield f"{process} dies", state._replace(dead=frozenset({process}))
        elif self.watched:
            yield "the watcher ends the rest", state._replace(is_stopped=True)

    def _settled(self, state: State) -> State:
        """Run all that runs at once: accesses, deliveries, barriers that all threads have reached, waits."""
        is_changed = not state.is_stopped
        while is_changed:
            is_changed = False
            for number in range(len(self.threads)):
                op = self._next(state, number)
                while isinstance(op, Read | Write | Deliver):
                    state = self._access(state, number, op)
                    is_changed, op = True, self._next(state, number)
                if isinstance(op, Wait) and self.waits_at_once and self._can_end(state, op):
                    state, is_changed = self._wait(state, number, op), True
                if isinstance(op, Meet) and (met := self._meet(state, number, op)) is not None:
                    state, is_changed = met, True
        return state

    def _access(self, state: State, number: int, op: Read | Write | Deliver) -> State:
        thread = self.threads[number]
        if isinstance(op, Deliver):
            if op.process in state.wrong:
                raise FoundError(f"{thread.name} delivers a wrong result of {op.process}")
            return self._advanced(state, number)
        place = self._places[op.place]
        before, clock, wrong = state.data[place], state.clocks[number], state.wrong
        knows = before.writer == number or clock[before.writer] >= before.written
        others = [time <= clock[i] or i == number for i, time in enumerate(before.reads)]
        is_race = not knows or (isinstance(op, Write) and not all(others))
        is_other = isinstance(op, Read) and op.version not in (None, before.version)
        if is_race or is_other:
            processes = {thread.process, self.threads[before.writer].process}
            processes |= {self.threads[i].process for i, known in enumerate(others) if not known}
            if not processes & wrong:
                kind = "a race" if is_race else f"version {before.version}"
                raise FoundError(f"{kind}: {thread.name} at {op}")
            wrong |= {thread.process}
        now = state.places[number] + 1
        if isinstance(op, Read):
            data = before._replace(reads=_with(before.reads, number, now))
        else:
            data = Data(op.version, number, now, (0,) * len(self.threads))
        state = self._advanced(state, number)
        return state._replace(data=_with(state.data, place, data), wrong=wrong)

    def _signal(self, state: State, number: int, op: Signal) -> State:
        at, clock = self._counters[op.counter], state.clocks[number]
        before = state.released[at]
        known = before[-1] if before else (0,) * len(clock)
        known = _join(known, clock) if op.releases else known
        return self._advanced(state._replace(released=_with(state.released, at, (*before, known))), number)

    def _wait(self, state: State, number: int, op: Wait) -> State:
        clocks = state.clocks
        if op.acquires and op.at_least > 0:
            known = state.released[self._counters[op.counter]][op.at_least - 1]
            clocks = _with(clocks, number, _join(clocks[number], known))
        return self._advanced(state._replace(clocks=clocks), number)

    def _meet(self, state: State, number: int, op: Meet) -> State | None:
        """Return the state after a barrier; None until all threads of the process are there."""
        process = self.threads[number].process
        members = [i for i, thread in enumerate(self.threads) if thread.process == process]
        if any(self._next(state, i) != op for i in members):
            return None
        clock = state.clocks[number]
        for i in members:
            clock = _join(clock, state.clocks[i])
        for i in members:
            state = self._advanced(state._replace(clocks=_with(state.clocks, i, clock)), i)
        return state

    def _advanced(self, state: State, number: int) -> State:
        done = state.places[number] + 1
        clock = _with(state.clocks[number], number, done)
        places, clocks = _with(state.places, number, done), _with(state.clocks, number, clock)
        return state._replace(places=places, clocks=clocks)


def changed(threads: Sequence[Thread], change: Callable[[Op], Op | None]) -> list[Thread]:
    """Return the threads with other operations, or without those for which `change` returns None."""
    return [
        replace(thread, ops=[new for op in thread.ops if (new := change(op)) is not None])
        for thread in threads
    ]


def _with(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _join(one: Clock, other: Clock) -> Clock:
    return tuple(map(max, one, other))


def _path(state: State, came_from: dict[State, tuple[State, str] | None]) -> tuple[str, ...]:
    labels = list[str]()
    while (before := came_from.get(state)) is not None:
        state, label = before
        labels.append(label)
    return tuple(reversed(labels))
