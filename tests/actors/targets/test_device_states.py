"""Recurrent states in device-driven steps: copied, saved, found again (device: see `devices.py`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta import SamplingParams
from manta.actors.llm import LLM
from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.scheduler_output import SchedulerOutput, StateEntry, StateSaves
from manta.drafter.compute.memory.recurrent_state_cache import StateMemory
from manta.drafter.step import recurrent_states as host
from manta.drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests, pack
from manta.drafter.step.gpu_triton.inputs.transfers import Upload
from manta.drafter.step.gpu_triton.recurrent_states import DeviceRecurrent, pack_saves
from manta.drafter.step.gpu_triton.request_states import DeviceStates
from manta.drafter.step.request_states import requests_of
from support.checkpoints.drafters import EAGLE3, write_drafter
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines.device_engines import SMALL_STATES, opened
from support.engines.devices import DEVICE, ON_GPU
from support.waiting import wait_until

KIND = RecurrentStateSpec(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3, taps=3)
NUM_STATES, NUM_SLOTS, MAX_DRAFTS, ROOM = 6, 3, 3, 8


class Mirrors:
    """The host's and the device's states over memories with the same content, which no layer changes."""

    def __init__(self) -> None:
        size = (2, KIND, NUM_STATES, MAX_DRAFTS, torch.float32)
        self.memories = StateMemory(*size, "cpu"), StateMemory(*size, DEVICE)
        generator = torch.Generator().manual_seed(0)
        for mine, theirs in zip(*(memory.tensors for memory in self.memories), strict=True):
            theirs.copy_(mine.normal_(generator=generator))
        self._host = host.RecurrentStates(self.memories[0], NUM_SLOTS)
        self._states = DeviceStates(NUM_SLOTS, 64, (8,), 16, DEVICE)
        self._device = DeviceRecurrent(self.memories[1], self._states.states_S, self._states.tables)
        self._upload = Upload(self._states.arena, 1, self._states.max_changes)

    def run(self, plan: SchedulerOutput, num_tokens: list[int]) -> list[int]:
        """Run a step with a number of tokens; return the records that its passes fold."""
        r = requests_of(plan, np.zeros(NUM_SLOTS, np.int64))
        self._host.apply(plan)
        decodes, rows = bool(plan.num_drafts.any()), self._host.rows(r)
        pending = rows.pending_R.tolist()
        for save in rows.saves if decodes else ():  # what a layer would write on its way
            self.memories[0].copy(rows.slots_R[[save.request]], np.array([save.slot]))
        self._host.advance(r, np.array(num_tokens))
        self._upload.send(np.zeros(1, np.int32), self._states.changes(plan))
        self._device.admit(plan)
        lists = torch.from_numpy(pack(plan.slots, plan.num_rows, plan.num_drafts, plan.samples, ROOM))
        maximum, num_rows = int(plan.num_rows.max()), plan.num_batched_tokens
        first_R, rows_R = (np.append(x_R, 0) for x_R in (plan.num_computed, plan.num_rows))  # and padding
        requests = (
            DeviceStepRequests.decoding(lists.to(DEVICE), len(rows_R), maximum, num_rows)
            if decodes
            else DeviceStepRequests.prompts(lists.to(DEVICE), first_R, rows_R, 0)
        )
        saves = torch.from_numpy(pack_saves(plan, np.arange(plan.num_requests), ROOM)).to(DEVICE)
        placed = self._device.build_rows(requests, None if decodes else saves)
        table = self._states.tables.num_computed
        for slot, begin, count in zip(plan.slots.tolist(), r.begin_R.tolist(), num_tokens, strict=True):
            table[slot] = begin + count - 1
        if decodes:
            self._device.save_accepted(lists[0, : plan.num_requests].to(DEVICE), saves)
        assert placed.pending_R.tolist() == [*pending, 0]
        assert placed.first_R.tolist() == [*r.first_R.tolist(), 0]
        for mine, theirs in zip(*(memory.tensors for memory in self.memories), strict=True):
            assert torch.equal(mine, theirs.cpu())
        return pending


def saves_of(*requested: tuple[int, int, int]) -> StateSaves:
    """Return saves of (request, position, state)."""
    return StateSaves(*np.array(requested, np.int32).T.copy())


def entering(plan: SchedulerOutput, *entries: tuple[int, StateEntry]) -> SchedulerOutput:
    one = plan.admitted[0] if plan.admitted else dummy_step([0], [1], [0], prompts=[np.zeros(1)]).admitted[0]
    return replace(plan, admitted=tuple(replace(one, slot=slot, state=entry) for slot, entry in entries))


def test_the_devices_states_have_the_hosts_positions() -> None:
    mirrors = Mirrors()
    first = entering(
        dummy_step([0, 0], [5, 4], [0, 0]), (0, StateEntry(0, None, 0)), (1, StateEntry(1, None, 0))
    )
    assert mirrors.run(replace(first, saves=saves_of((0, 3, 2), (0, 9, 3))), [1, 1]) == [0, 0]
    # All drafts of one are accepted, none of the other; saved after a draft, after the anchor, nowhere.
    saves = saves_of((0, 8, 3), (1, 5, 4), (1, 6, 5))
    second = replace(dummy_step([5, 4], [4, 4], [3, 3]), saves=saves)
    assert mirrors.run(second, [4, 1]) == [0, 0]
    # Asked for when a step in flight had passed it: nothing is written.
    late = replace(dummy_step([9, 5], [4, 4], [3, 3]), saves=saves_of((0, 8, 2)))
    assert mirrors.run(late, [2, 3]) == [3, 0]
    # One begins as a copy that folds two records, another takes its source over, a third what it was made of.
    third = dummy_step([8, 5, 3], [1, 2, 1], [0, 0, 0])
    copies = ((0, StateEntry(5, 3, 8)), (1, StateEntry(3, 4, 5)), (2, StateEntry(2, 2, 3)))
    assert mirrors.run(entering(third, *copies), [1, 1, 1]) == [2, 0, 0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = make_tiny_target(folder / "target", "qwen3_5", seed=5, **SMALL_STATES)
    return target, make_tiny_drafter(folder / "drafter")


PROMPTS = [[7, *range(2, 27), n] for n in (40, 41)]


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_preemption_prefix_hits_and_aborts_change_no_token(pair: tuple[Path, Path]) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8)
    with opened(pair[0], None, "torch", enable_prefix_caching=False) as llm:
        expected = tokens(llm, params)
    few = {"num_pages": 4, "num_states": 5, "async_scheduling": True}
    with opened(*pair, "triton", **few) as llm:
        leaving = llm.stream({"prompt_token_ids": PROMPTS[0]}, replace(params, max_tokens=12))
        assert next(leaving) is not None
        leaving.close()
        assert tokens(llm, params) == expected
        stats = llm.stats()
    assert stats.preemptions > 0 and stats.prefix_cache_hits > 0 and stats.num_drafts > 0


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="one GPU is no two ranks; ray_session has none")
@pytest.mark.parametrize(("ranks", "placement"), [(1, "split"), (2, "colocated"), (2, "split")])
def test_ranks_and_a_split_drafter_change_no_token(
    ray_session: None, tmp_path: Path, ranks: int, placement: str
) -> None:
    """Each rank keeps the states of its heads; a split drafter keeps none and gets the target's ids."""
    sizes = {**SMALL_STATES, "linear_num_key_heads": 2}
    target = make_tiny_target(tmp_path / "target", "qwen3_5", seed=5, **sizes)
    drafter = make_tiny_drafter(tmp_path / "drafter")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=6)
    with opened(target, None, "torch") as llm:
        expected = tokens(llm, params)
    spec = {"model": str(drafter), "num_speculative_tokens": 2, "adaptive": False, "placement": placement}
    settings = {"speculative_config": spec, "tensor_parallel_size": ranks, "async_scheduling": True}
    with opened(target, drafter, "triton", **settings) as llm:

        def starts_from_saved_states() -> bool:
            assert tokens(llm, params) == expected
            return llm.stats().prefix_cache_hits > 0 < llm.stats().num_drafts

        wait_until(starts_from_saved_states)  # on a busy machine a split drafter is lost, and its context


@pytest.mark.slow
def test_eagle3_with_recurrent_states_changes_no_token(pair: tuple[Path, Path], tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path, EAGLE3["speculators normed before fc"])
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8)
    with opened(pair[0], None, "torch") as llm:
        expected = tokens(llm, params)
    spec = {"model": str(drafter), "method": "eagle3", "num_speculative_tokens": 2, "adaptive": False}
    with opened(pair[0], drafter, "triton", speculative_config=spec, async_scheduling=True) as llm:
        assert tokens(llm, params) == expected
        assert llm.stats().num_drafts > 0
