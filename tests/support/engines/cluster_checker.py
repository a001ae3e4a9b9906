"""An executor that verifies every plan: it keeps what a real K/V cache would hold and checks every read.

Each place (pool, page, offset) holds a group and the digest of the tokens from the sequence's start up to the
one written there, salt included: exactly what K and V at a position depend on. Rows of a step are written in
every group, drafts too (wrong ones where they will be rejected), and then every position that a row attends
to, within the group's window, must hold that group's right digest. A page shared too early, remembered while
it held a rejected draft, freed or given back under a reader shows up as a wrong read. Recurrent states are
`StateChecker`'s. Also here: how the tests of the cluster floor make requests and run them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore, SequenceUpdate
from manta.cluster.engine.engine_stats import EngineStats
from manta.cluster.request.request import FinishReason, Request, SamplingParams
from manta.cluster.scheduler.background_budget import BackgroundWork
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor, simulated_tokens
from manta.cluster.step.executor import Executor, ExecutorInfo
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult, StepTimings
from manta.cluster.step.sequence import Sequence as RunningSequence


@dataclass(frozen=True)
class Held:
    """Tokens in a state, and records saved with it."""

    salt: str | None
    tokens: tuple[int, ...]
    records: tuple[int, ...] = ()

    def leads_to(self, tokens: list[int], salt: str | None) -> bool:
        """Whether the state after exactly these tokens can be made of it."""
        seen = self.tokens + self.records
        behind = len(self.tokens) <= len(tokens) <= len(seen)
        return self.salt == salt and behind and seen[: len(tokens)] == tuple(tokens)


class StateChecker:
    """The states of one executor, by id. `num_saved` and `num_loaded` count events for tests."""

    def __init__(self, num_states: int) -> None:
        self._num_states = num_states
        self.held: dict[int, Held] = {}
        self._state_of: dict[int, int] = {}  # by slot
        self.num_saved = self.num_loaded = 0

    def enter(self, plan: SchedulerOutput, salts: dict[int, str | None]) -> None:
        """All sources are read before anything is written."""
        begins: dict[int, Held] = {}
        for request in plan.admitted:
            entry, salt = request.state, salts[request.slot]
            assert entry is not None and 0 <= entry.state < self._num_states, "nobody runs without a state"
            assert entry.state not in begins, "two enter with one state"
            begins[entry.state] = Held(salt, ())
            if entry.source is not None:
                tokens = request.token_ids[: entry.num_tokens].tolist()
                assert self.held[entry.source].leads_to(tokens, salt), "a source holds something else"
                begins[entry.state] = self.held[entry.source]
                self.num_loaded += 1
            self._state_of[request.slot] = entry.state
        self.held |= begins

    def check_form(self, plan: SchedulerOutput) -> None:
        states = [self._state_of[slot] for slot in plan.slots.tolist()]
        assert len(set(states)) == len(states), "two requests have one state"
        if plan.saves is not None:
            requested = plan.saves.states.tolist()
            assert len(set(requested)) == len(requested) > 0, "a state is asked for twice"
            assert not set(requested) & set(states), "a state has two writers"
            assert all(0 <= state < self._num_states for state in requested)

    def run(self, slot: int, first: int, tokens: list[int], drafts: list[int], salt: str | None) -> None:
        """A pass over `tokens[first:]` and drafts, of which a number is right."""
        state = self._state_of[slot]
        assert self.held[state].leads_to(tokens[:first], salt), "a state has seen something else"
        self.held[state] = Held(salt, tuple(tokens), tuple(drafts))

    def save(self, plan: SchedulerOutput, first_R: list[int], computed_R: list[int]) -> None:
        """Save the requested positions that the pass has passed."""
        if plan.saves is None:
            return
        columns = (plan.saves.requests, plan.saves.positions, plan.saves.states)
        for r, position, state in zip(*(column.tolist() for column in columns), strict=True):
            if not first_R[r] < position <= computed_R[r]:
                continue
            held = self.held[self._state_of[int(plan.slots[r])]]
            if position <= len(held.tokens):
                held = Held(held.salt, held.tokens[:position])
            self.held[state] = held
            self.num_saved += 1


VOCAB = 23
EOS = (0, 1)
PROMPT = (2, 3, 4)
SURVIVAL = (0.8, 0.6, 0.4, 0.2)
FREE = LinearCost()  # steps take no time, so that nothing is learned from it


def make_info(**changes: Any) -> ExecutorInfo:  # Any: fields of any type
    facts: dict[str, Any] = {
        "num_pages": (64,),
        "page_size": 4,
        "max_model_len": 64,
        "vocab_size": VOCAB,
        "eos_token_ids": EOS,
        "num_speculative_tokens": 4,
        "dtype": "float32",
        "device": "cpu",
    }
    return ExecutorInfo(**{**facts, **changes})


def make_request(request_id: str, prompt: Iterable[int] = PROMPT, **fields: Any) -> Request:
    """Make a request; `fields` are those of `Request` and of its `SamplingParams`."""
    own = {name: fields.pop(name) for name in Request.__dataclass_fields__ if name in fields}
    params = SamplingParams(**{"seed": sum(map(ord, request_id)), **fields})
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=params, **own)


@dataclass
class _Slot:
    tokens: list[int]
    salt: str | None
    max_length: int
    max_drafts: int
    pages: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, index) -> page; stale ones stay
    ends: dict[int, int] = field(default_factory=dict)  # group -> index after its last page
    num_computed: int | None = None  # not known until the first plan: depends on prefix hits


class CheckingExecutor(SimulatedExecutor):
    """Simulates, and asserts that plans are well-formed and read only what was correctly written."""

    def __init__(self, info: ExecutorInfo, max_rows: int, max_slots: int, survival: Sequence[float]) -> None:
        super().__init__(info, survival)
        self.max_rows, self.max_slots = max_rows, max_slots
        self.requests: dict[str, Request] = {}
        self.slots: dict[int, _Slot] = {}
        self.held: dict[tuple[int, int, int], tuple[int, int]] = {}  # (pool, page, offset) -> group, digest
        self.seen: dict[tuple[int, int, int], int] = {}  # place -> the drafter that has its context, if any
        self.num_steps = 0
        self.states = None if info.num_states is None else StateChecker(info.num_states)

    def submit(self, plan: SchedulerOutput) -> None:
        if self.info.halves:
            new = {request.slot for request in plan.admitted}
            under_way = {slot for _, slots in self._times._in_flight for slot in slots.tolist()}
            assert not under_way & set(plan.slots.tolist()) - new, "plans in flight have a request in common"
        super().submit(plan)

    def _run(self, plan: SchedulerOutput) -> StepResult:
        self._check_form(plan)
        self._apply(plan)
        for request in plan.admitted:
            self._admit(request)
        first_R = self.first_positions(plan).tolist()
        if self.states is not None:
            self.states.enter(plan, {a.slot: self.slots[a.slot].salt for a in plan.admitted})
            self.states.check_form(plan)
        result = super()._run(plan)
        written: set[tuple[int, int, int]] = set()
        chains = [self._write(plan, r, first, result, written) for r, first in enumerate(first_R)]
        for r, chain in enumerate(chains):
            slot = self.slots[int(plan.slots[r])]
            assert plan.num_drafts[r] <= slot.max_drafts, f"row {r} has more drafts than it asked for"
            for g, group in enumerate(self.info.page_groups):
                begin = 0 if group.window is None else max(first_R[r] - group.window + 1, 0)
                for position in range(begin, len(chain)):
                    held = self.held.get(self._place(slot, g, position))
                    assert held == (g, chain[position]), f"row {r}, group {g}: wrong at {position}"
                if plan.num_drafts[r]:
                    places = [self._place(slot, g, position) for position in range(begin, first_R[r])]
                    known = {self.seen[place] for place in places}
                    assert known <= {self.drafter_health.generation}, "drafts without context"
        self._advance(plan, first_R, result)
        if self.states is not None:
            self.states.save(plan, first_R, self._computed_S[plan.slots].tolist())
        return result

    def _check_form(self, plan: SchedulerOutput) -> None:
        count = plan.num_requests
        arrays = (plan.slots, plan.num_computed, plan.num_rows, plan.num_drafts)
        assert all(a.dtype == np.int32 and a.shape == (count,) for a in arrays)
        assert plan.samples.dtype == np.bool_ and plan.samples.shape == (count,)
        entries = (plan.page_groups, plan.page_slots, plan.page_indices, plan.page_ids)
        assert all(a.dtype == np.int32 and a.shape == plan.page_ids.shape for a in entries)
        assert plan.step == self.num_steps and count >= 1
        slots = plan.slots.tolist()
        assert len(set(slots)) == count and all(0 <= s < self.max_slots for s in slots)
        assert {a.slot for a in plan.admitted} <= set(slots) and set(plan.page_slots.tolist()) <= set(slots)
        assert plan.num_batched_tokens <= self.max_rows and (plan.num_rows >= 1).all()
        assert self.drafter_health.ready or not plan.num_drafts.any()
        assert (plan.num_drafts >= 0).all() and (plan.num_drafts <= self.info.num_speculative_tokens).all()
        self.num_steps += 1

    def _apply(self, plan: SchedulerOutput) -> None:
        for a in plan.admitted:
            request = self.requests[a.request_id]
            limits = self.info.max_model_len, longest(self.info, self.max_rows)
            length = len(request.prompt_token_ids)
            limit = min(length + (request.params.max_tokens or limits[0]), *limits)
            drafts = request.max_drafts(self.info.num_speculative_tokens)
            self.slots[a.slot] = _Slot(a.token_ids.tolist(), request.cache_salt, limit, drafts)
        entries = zip(
            plan.page_groups.tolist(),
            plan.page_slots.tolist(),
            plan.page_indices.tolist(),
            plan.page_ids.tolist(),
            strict=True,
        )
        for g, number, index, page in entries:
            slot, group = self.slots[number], self.info.page_groups[g]
            begin = 0 if group.window is None else index  # reads check where a window begins
            assert index == slot.ends.get(g, begin), "page tables grow without gaps"
            assert 0 <= page < self.info.num_pages[group.pool]
            slot.pages[g, index], slot.ends[g] = page, index + 1

    def _place(self, slot: _Slot, group: int, position: int) -> tuple[int, int, int]:
        index, offset = divmod(position, self.info.page_size)
        assert (group, index) in slot.pages, f"position {position} has no page in group {group}"
        return self.info.page_groups[group].pool, slot.pages[group, index], offset

    def _write(
        self,
        plan: SchedulerOutput,
        r: int,
        begin: int,
        result: StepResult,
        written: set[tuple[int, int, int]],
    ) -> list[int]:
        """Write the rows of request r; return the digests of all positions that its rows attend to."""
        slot = self.slots[int(plan.slots[r])]
        rows, drafts = int(plan.num_rows[r]), int(plan.num_drafts[r])
        known = len(slot.tokens)
        if known >= slot.max_length:
            assert plan.num_computed[r] < 0 and rows == 1, "a sequence that has ended was planned knowingly"
            return []
        assert slot.num_computed in (None, begin), "a row was computed twice or left out"
        assert slot.num_computed is not None or begin % self.info.page_size == 0
        assert begin < known and begin + rows - drafts <= known
        assert drafts == 0 or (begin == known - 1 and rows == 1 + drafts), "drafts stand behind the anchor"
        assert bool(plan.samples[r]) == (begin + rows - drafts == known)
        assert known + int(plan.samples[r]) + drafts <= self.info.max_model_len
        for g, group in enumerate(self.info.page_groups):  # what no row sees any more is never allocated
            seen = 0 if group.window is None else max(begin - group.window + 1, 0) // self.info.page_size
            assert slot.num_computed is not None or min(i for k, i in slot.pages if k == g) >= seen
        accepted = max(int(result.num_tokens[r]) - 1, 0)
        right = result.token_ids[r, :accepted].tolist()
        inputs = slot.tokens + right + [VOCAB + r] * (drafts - accepted)
        if self.states is not None:
            standing = begin + rows - drafts
            self.states.run(
                int(plan.slots[r]), begin, inputs[:standing], inputs[standing : begin + rows], slot.salt
            )
        chain: list[int] = [hash(slot.salt)]
        for token in inputs[: begin + rows]:
            chain.append(hash((chain[-1], token)))
        for position in range(begin, begin + rows):
            for g in range(len(self.info.page_groups)):
                place = self._place(slot, g, position)
                assert place not in written, "two rows write the same place"
                written.add(place)
                self.held[place] = g, chain[position + 1]
                reported = plan.writes_context and self.drafter_health.ready
                self.seen[place] = self.drafter_health.generation if reported else -1
        return chain[1:]

    def _advance(self, plan: SchedulerOutput, first_R: list[int], result: StepResult) -> None:
        for r, index in enumerate(plan.slots.tolist()):
            slot, count = self.slots[index], int(result.num_tokens[r])
            slot.num_computed = int(first_R[r] + plan.num_rows[r] - plan.num_drafts[r])
            slot.num_computed += max(count - 1, 0)
            slot.tokens += result.token_ids[r, :count].tolist()


@cache
def longest(info: ExecutorInfo, max_rows: int) -> int:
    """Tokens of the longest sequence that the pages hold: one more than have K/V."""

    def fits(num_computed: int) -> bool:
        left = list(info.num_pages)
        for group in info.page_groups:
            seen = num_computed if group.window is None else group.window + max_rows
            all_pages, seen_pages = (-(-count // info.page_size) for count in (num_computed, seen))
            left[group.pool] -= all_pages if group.window is None else min(all_pages, seen_pages + 1)
        return min(left) >= 0

    return 1 + max(count for count in range(info.max_model_len) if fits(count))


def expected(request: Request, info: ExecutorInfo, max_rows: int = 64) -> tuple[list[int], str, int | None]:
    """Tokens, finish reason and stop reason of a request, computed token by token."""
    params, length = request.params, len(request.prompt_token_ids)
    eos = set() if params.ignore_eos else set(info.eos_token_ids)
    room = longest(info, max_rows) - length
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    sampling = RunningSequence.of(request, (0, 0, 0), info.max_model_len, info.eos_token_ids).sampling
    tokens: list[int] = []
    for token in simulated_tokens(sampling, length, limit, info.vocab_size):
        tokens.append(token)
        if len(tokens) > params.min_tokens and token in eos:
            return tokens, "stop", None
        if len(tokens) > params.min_tokens and token in params.stop_token_ids:
            return tokens, "stop", token
    return tokens, "length", None


@dataclass
class Outputs:
    """The outputs, by request; check that nothing follows an end."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def put(self, update: SequenceUpdate) -> None:
        assert update.request_id not in self.ends
        assert update.token_ids or update.finish_reason == "error"
        assert 0 <= update.num_accepted <= min(update.num_drafted, len(update.token_ids))
        assert update.num_accepted >= len(update.token_ids) - 1
        self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
        self.cached[update.request_id] = update.num_cached_tokens
        if update.finish_reason is not None:
            self.ends[update.request_id] = (update.finish_reason, update.stop_reason)

    def of(self, requests: Iterable[Request]) -> Outputs:
        """Return the outputs of these requests."""
        names = {request.request_id for request in requests}
        parts = ({name: part[name] for name in part if name in names} for part in self._parts())
        return Outputs(*parts)

    def forget(self, request_id: str) -> None:
        for part in self._parts():
            part.pop(request_id, None)

    def _parts(self) -> tuple[dict[str, Any], ...]:  # Any: each part has values of its own
        return self.tokens, self.ends, self.cached


class SimulatedEngine(EngineCore):
    """An engine over a simulated executor, whose steps tests may run one by one.

    Attributes:
        executor, scheduler: its parts.
    """

    def __init__(self, config: EngineConfig, executor: SimulatedExecutor) -> None:
        super().__init__(config, executor)
        self.executor = executor
        self.scheduler = self._scheduler

    def add(self, request_id: str, prompt: Iterable[int] = PROMPT, **fields: Any) -> Request:
        """Make a request and queue it."""
        request = make_request(request_id, prompt, **fields)
        self.add_request(request)
        return request

    def next_plan(self) -> SchedulerOutput:
        """Plan a step, of which there must be one."""
        plan = self.plan()
        assert plan is not None, "no step is planned"
        return plan

    def submit(self, *plans: SchedulerOutput) -> None:
        for plan in plans:
            self.executor.submit(plan)

    def finish_step(self) -> list[SequenceUpdate]:
        """Collect and commit the oldest submitted step."""
        return self.commit(self.executor.collect())

    def run_step(self) -> SchedulerOutput:
        """Run one step alone and return its plan."""
        (plan,) = self.run_steps(1)
        return plan

    def run_steps(self, count: int) -> list[SchedulerOutput]:
        """Run up to `count` steps one by one, until nothing is left to do; return their plans."""
        plans: list[SchedulerOutput] = []
        while len(plans) < count and (plan := self.plan()) is not None:
            self.submit(plan)
            self.finish_step()
            plans.append(plan)
        self.check_invariants()
        return plans


class CheckedEngine(SimulatedEngine):
    """An engine whose executor checks every read, and whose invariants are checked after every call.

    Attributes:
        outputs: what all requests have returned.
    """

    executor: CheckingExecutor

    def __init__(self, config: EngineConfig, executor: CheckingExecutor) -> None:
        super().__init__(config, executor)
        self.outputs = Outputs()

    def add_requests(self, requests: Sequence[Request]) -> None:
        super().add_requests(requests)
        for request in requests:
            self.executor.requests[request.request_id] = request
            self.outputs.forget(request.request_id)

    def plan(self) -> SchedulerOutput | None:
        plan = super().plan()
        self.check_invariants()
        return plan

    def commit(self, result: StepResult) -> list[SequenceUpdate]:
        updates = super().commit(result)
        for update in updates:
            self.outputs.put(update)
        self.check_invariants()
        return updates

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        found = super().abort(request_id, reason)
        self.check_invariants()
        return found

    def run(self, *requests: Request) -> Outputs:
        """Add all requests together and step until nothing is left to do; return their outputs, or all."""
        for request in requests:
            self.add_request(request)
        begin = self.stats().steps
        while self.has_unfinished:
            self.step()
            assert self.stats().steps < begin + 3000, "no progress"
        return self.outputs.of(requests) if requests else self.outputs

    def check_outputs(self, *requests: Request) -> None:
        """Run to the end, and check that each of these requests got its own tokens."""
        self.run()
        for request in requests:
            own = expected(request, self.executor.info, self.executor.max_rows)[0]
            assert self.outputs.tokens[request.request_id] == own, request.request_id


def open_engine(
    info: ExecutorInfo | None = None,
    survival: Sequence[float] = SURVIVAL,
    make: Callable[..., CheckingExecutor] = CheckingExecutor,
    **settings: Any,
) -> CheckedEngine:
    """Return an engine of 8 slots and steps of 64 rows, unless `settings` say otherwise."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings}
    rows, slots = sizes["max_num_batched_tokens"], sizes["max_num_seqs"]
    executor = make(info or make_info(), rows, min(slots, rows), survival)
    return CheckedEngine(EngineConfig(model="simulated", **sizes), executor)


def simulated_engine(
    info: ExecutorInfo,
    survival: Sequence[float] = SURVIVAL,
    cost: Callable[[SchedulerOutput], StepTimings] = FREE,
    *,
    hardness: Callable[[str], float] = lambda request_id: 1.0,
    grow_s: float = 0.0,
    **settings: Any,
) -> SimulatedEngine:
    """Return an engine whose steps take simulated seconds, without checks; its clock begins at 0."""
    config = EngineConfig.from_dict({"model": "simulated", **settings})
    return SimulatedEngine(config, SimulatedExecutor(info, survival, cost, hardness, grow_s))


def generate(
    engine: EngineCore, *requests: Request, before_step: Callable[[int], None] = lambda step: None
) -> dict[str, list[int]]:
    """Serve requests together; return their tokens. `before_step` is called with the number of each step."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps = itertools.count()
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished:
        before_step(next(steps))
        for update in engine.step():
            tokens[update.request_id] += update.token_ids
    engine.check_invariants()
    return tokens


def check_tokens_are_plain(
    config: EngineConfig,
    executor: Executor,
    engine: EngineCore,
    max_tokens: int,
    before_step: Callable[[int], None] = lambda step: None,
) -> EngineStats:
    """Check that an engine gives the tokens of plain decoding; close its executor, return its stats."""

    def made(**fields: Any) -> list[Request]:
        common = {"max_tokens": max_tokens, "ignore_eos": True, **fields}
        return [
            make_request(f"r{i}", range(3 + i, 30 + i), temperature=i / 3, seed=i, **common) for i in range(4)
        ]

    plain = generate(EngineCore(config, executor), *made(max_draft_tokens=0))
    assert generate(engine, *made(), before_step=before_step) == plain
    executor.close()
    return engine.stats()


def vary_background(engine: CheckedEngine, seed: int) -> None:
    """Allows any amount of background work in its steps, whatever it learns of costs."""
    scheduler, random = engine.scheduler, np.random.default_rng(seed)
    maximum, chunks = int(random.integers(6)), scheduler.config.enable_chunked_prefill

    def portion(minimum: int) -> BackgroundWork:
        return BackgroundWork(*random.integers(minimum, minimum + maximum, 2, endpoint=True).tolist())

    scheduler.controller.background_with_online = lambda online, num_decoding: portion(0)
    if chunks:
        scheduler.controller.background_without_online = lambda num_decoding, idle_s: portion(1)


def vary_halves(engine: CheckedEngine, seed: int) -> None:
    """Changes between both modes randomly, whatever it learns of costs."""
    random = np.random.default_rng(seed)
    engine.scheduler.controller.uses_two_batches = lambda num_requests: bool(random.random() < 0.7)


def vary_prefill(engine: CheckedEngine, seed: int) -> None:
    """Bounds the rows of prompts in steps with decoding requests by random numbers."""
    random, controller = np.random.default_rng(seed), engine.scheduler.controller
    if engine.scheduler.config.enable_chunked_prefill:
        controller.prefill_rows = lambda: int(
            random.integers(1, engine.scheduler.config.max_rows, endpoint=True)
        )


def check_histories(
    engine: CheckedEngine, served: Mapping[str, Request], known: Mapping[str, list[int]]
) -> None:
    """Check that the timeline of each ended request equals its outputs, step by step."""
    outputs, whys = engine.outputs, Counter[str | None]()
    for name, request in served.items():
        (life,) = (each for each in engine.timelines(name) if each.request_id == name)
        steps = [step for stay in life.intervals for step in stay.steps]
        assert sum(step.num_tokens for step in steps) == len(outputs.tokens.get(name, []))
        assert all(step.num_tokens - step.num_accepted in (0, 1) for step in steps)
        assert all(step.num_accepted <= step.num_verified <= step.num_drafted for step in steps)
        assert life.ended_s is not None and all(stay.released_s is not None for stay in life.intervals)
        assert [stay.num_forgotten for stay in life.intervals] == [0] * len(life.intervals)
        whys += Counter(stay.why for stay in life.intervals)
        if name in outputs.ends:
            assert life.finish_reason == outputs.ends[name][0]
            last = life.intervals[-1]
            computed = sum(step.num_known + max(step.num_tokens - 1, 0) for step in last.steps)
            every = len(request.prompt_token_ids) + len(known.get(name, [])) + len(outputs.tokens[name])
            assert last.num_cached + computed == every - 1, "the last token is never computed"
        else:
            assert life.finish_reason == "abort"
    assert whys["preempted"] == engine.stats().preemptions
