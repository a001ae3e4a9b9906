"""A worker's states under real plans: a row reads what it reads in one pass over its whole sequence.

That holds whatever is drafted, saved, copied and preempted. The scheduler, the state managers on both sides,
the memory and the layer (`compute/eager/gated_delta_net.py`) are real; only tokens are simulated.
`test_delta_net.py` tests the layer itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from manta.cluster.config import EngineConfig
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.executor import ExecutorInfo
from manta.cluster.step.scheduler_output import SchedulerOutput, StateEntry, StateSaves, StepResult
from manta.drafter.compute.backend import PlacedRows
from manta.drafter.compute.eager.attention_metadata import EagerPass
from manta.drafter.compute.eager.gated_delta_net import EagerDeltaNet
from manta.drafter.compute.layers.gated_delta_net import DeltaNetShape
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from manta.drafter.compute.memory.recurrent_state_cache import StateMemory, StateRows
from manta.drafter.step.recurrent_states import RecurrentStates
from manta.drafter.step.request_states import requests_of
from support.engines.cluster_checker import CheckedEngine, CheckingExecutor, expected, make_info
from support.engines.random_workloads import Arrival, arrivals, step
from torch import Tensor
from torch.testing import assert_close

KIND = RecurrentStateSpec(num_key_heads=1, num_value_heads=2, key_dim=3, value_dim=2, taps=3)
NUM_LAYERS = 1
NUM_DRAFTS = 5
_dice = torch.Generator().manual_seed(3)


def dice(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=_dice)


LAYERS = [
    EagerDeltaNet(
        DeltaNetShape(
            geometry=KIND,
            kernel_CT=dice(KIND.channels, KIND.taps),
            rate_V=-dice(2).exp(),
            dt_bias_V=dice(2),
            norm_F=1 + 0.1 * dice(2),
            eps=1e-6,
        )
    )
    for _ in range(NUM_LAYERS)
]
MIXED = dice(NUM_LAYERS, 64, KIND.channels + KIND.num_value_heads * (KIND.value_dim + 2))


def new_cache(num_states: int) -> PagedKVCache:
    memory = StateMemory(NUM_LAYERS, KIND, num_states, NUM_DRAFTS, torch.float32, "cpu")
    return PagedKVCache(1, 1, 1, KVCacheSpec(1, 1, 1), torch.float32, "cpu", memory)


def read(tokens: list[int], rows: StateRows, cache: PagedKVCache) -> Tensor:
    """Return the results of rows of these tokens in all layers, [N, L * G]."""
    step = EagerPass(PlacedRows(torch.empty(0), (), (), states=rows))
    return torch.cat([layer(MIXED[i][tokens], step, cache, i) for i, layer in enumerate(LAYERS)], dim=1)


def read_in_one_pass(tokens: list[int]) -> Tensor:
    numbers = (np.array([n], dtype=np.int64) for n in (0, len(tokens), 0, 0))
    return read(tokens, StateRows(*numbers), new_cache(1))


class LayersExecutor(CheckingExecutor):
    """Also runs the layers, and checks what every accepted row reads."""

    def __init__(self, info: ExecutorInfo, max_rows: int, max_slots: int, survival: list[float]) -> None:
        super().__init__(info, max_rows, max_slots, survival)
        assert info.num_states is not None
        self._cache = new_cache(info.num_states)
        assert self._cache.states is not None
        self._recurrent = RecurrentStates(self._cache.states, max_slots)
        self._names: dict[int, str] = {}
        self.read: dict[str, dict[int, Tensor]] = {}  # by request and position

    def _advance(self, plan: SchedulerOutput, first_R: list[int], result: StepResult) -> None:
        self._names |= {request.slot: request.request_id for request in plan.admitted}
        self._recurrent.apply(plan)
        r = requests_of(replace(plan, num_computed=np.array(first_R)), np.zeros(self.max_slots, np.int64))
        tokens, standing = list[int](), list[int]()
        for i, index in enumerate(plan.slots.tolist()):
            count = max(int(result.num_tokens[i]) - 1, 0)
            drafts = result.token_ids[i, :count].tolist() + [40 + i] * (int(plan.num_drafts[i]) - count)
            known = (self.slots[index].tokens + [63] * 8)[first_R[i] : int(r.begin_R[i])]
            tokens += known + drafts
            standing.append(len(known) + count)
        read_NG = read(tokens, self._recurrent.rows(r), self._cache)
        self._recurrent.advance(r, result.num_tokens.astype(np.int64))
        begin = 0
        for i, index in enumerate(plan.slots.tolist()):
            rows = {first_R[i] + n: read_NG[begin + n] for n in range(standing[i])}
            self.read.setdefault(self._names[index], {}).update(rows)
            begin += int(plan.num_rows[i])
        super()._advance(plan, first_R, result)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[CheckedEngine, list[Arrival]]:
    page_size = draw(st.sampled_from((1, 2)))
    info = make_info(
        page_size=page_size,
        num_pages=(draw(st.integers(33, 50)) * 2 // page_size,),
        num_states=draw(st.integers(2, 12)),
        num_speculative_tokens=NUM_DRAFTS,
        max_in_flight=draw(st.sampled_from((1, 2))),
    )
    rows = draw(st.integers(6, 40))
    config = EngineConfig(model="simulated", max_num_seqs=4, max_num_batched_tokens=rows)
    executor = LayersExecutor(info, rows, 4, [0.9, 0.8, 0.6, 0.4, 0.3])
    engine = CheckedEngine(config, executor)
    return engine, [draw(arrivals(i)) for i in range(draw(st.integers(2, 8)))]


@settings(max_examples=15, deadline=None)
@given(workload=workloads())
def test_every_row_reads_the_state_of_a_single_pass(
    workload: tuple[CheckedEngine, list[Arrival]],
) -> None:
    engine, todo = workload
    executor, aborted, now = engine.executor, set[str](), 0
    waiting = sorted(todo, key=lambda arrival: arrival.step)
    while waiting or engine.has_unfinished:
        while waiting and waiting[0].step <= now:
            engine.add_request(waiting.pop(0).request)
        step(engine, {a.request.request_id: a for a in todo if a.abort_step == now}, aborted)
        now += 1
    for arrival in todo:
        request = arrival.request
        seen = executor.read.get(request.request_id, {})
        tokens = [*request.prompt_token_ids, *expected(request, executor.info, executor.max_rows)[0]]
        whole_NG = read_in_one_pass(tokens)
        for position, read_G in seen.items():
            if position < len(tokens):
                assert_close(read_G, whole_NG[position], rtol=1e-4, atol=1e-5)
    event(f"saved: {executor.states.num_saved > 0}, found again: {executor.states.num_loaded > 0}")
    event(f"preempted: {engine.stats().preemptions > 0}")


def test_a_sequence_that_starts_from_a_copy_folds_its_saved_records() -> None:
    """The state is saved after one of two accepted drafts: the state before them, and their records."""
    memory, zeros = new_cache(3).states, np.zeros(2, np.int64)
    assert memory is not None
    states = RecurrentStates(memory, 2)
    first = dummy_step([0], [4], [0], prompts=[np.zeros(4, np.int32)])
    one, position, state = (np.array([n], np.int32) for n in (0, 6, 1))
    second = replace(dummy_step([4], [4], [3]), saves=StateSaves(one, position, state))
    for plan, count in ((first, 1), (second, 3)):
        states.apply(plan)
        r = requests_of(plan, zeros)
        states.rows(r)
        for part in memory.tensors:
            part[:, 0] = dice(*part[:, 0].shape)
        states.advance(r, np.array([count]))
    copy = replace(first.admitted[0], slot=1, state=StateEntry(2, source=1, num_tokens=6))
    third = replace(dummy_step([6], [1], [0]), slots=one + 1, admitted=(copy,))
    states.apply(third)
    assert states.rows(requests_of(third, zeros)).pending_R.tolist() == [1]
    assert all(torch.equal(part[:, 2], part[:, 0]) for part in memory.tensors)


def test_all_sources_are_read_before_a_target_is_written() -> None:
    memory = new_cache(3).states
    assert memory is not None
    before = [part.copy_(dice(*part.shape)).clone() for part in memory.tensors]
    memory.copy(np.array([0, 1]), np.array([1, 2]))
    for part, old in zip(memory.tensors, before, strict=True):
        assert torch.equal(part[:, 1:], old[:, :2])
