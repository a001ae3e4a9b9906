"""Memory of recurrent layers: the loader's sizes, fewer requests, and the time for each state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manta.actors.targets.families import read_model
from manta.actors.targets.loading.memory_budget import (
    affordable_pages,
    affordable_states,
    page_bytes,
    state_bytes,
)
from manta.actors.targets.loading.resolved_config import ResolvedConfig, resolve_models
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.hardware.gpu_specs import GPUS
from manta.cluster.hardware.layer_shape import LayerShape
from manta.cluster.hardware.memory_estimate import MAX_NUM_SEQS, estimate_memory
from manta.cluster.hardware.model_pair import LayoutDemand, ModelPair
from manta.cluster.hardware.model_shape import ModelShape
from manta.cluster.hardware.parallel_layouts import ParallelLayout
from manta.cluster.hardware.step_time import StepTimes
from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from manta.cluster.simulation.simulated_engine import simulated_engine, simulated_request
from manta.cluster.step.scheduler_output import StepTimings
from manta.jobs.plan.pair_reader import target_shape
from support.checkpoints.tiny import make_tiny_target

FULL = LayerShape(heads=24, kv_heads=4, head_dim=256, v_head_dim=256, inter=17408, gated=True)
RECURRENT = LayerShape(state=RecurrentStateSpec(16, 48, 128, 128, 4), inter=17408)
QWEN_27B = ModelShape(layers=(RECURRENT, RECURRENT, RECURRENT, FULL) * 16, hidden=5120, vocab=248320)
PAIR = ModelPair(target=QWEN_27B, drafter=None, tied=False, tp_sizes=(1, 2, 4))
ONE = ParallelLayout(1, None, 1)
DEMAND = LayoutDemand(max_model_len=32768, context=4096)


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    folder = make_tiny_target(tmp_path_factory.mktemp("target"), "qwen3_5")
    config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", max_num_seqs=6)
    return resolve_models(config, folder, read_model(folder), None, None, 256)


def test_a_27b_has_the_weights_and_states_of_its_card() -> None:
    assert pytest.approx(26.9e9, rel=0.02) == QWEN_27B.linear_params + 2 * QWEN_27B.head_params
    assert QWEN_27B.kv_bytes == 64 * 1024 and len(QWEN_27B.windows) == 16
    states = 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)  # the rule's in fp32, and three inputs of convolutions
    assert QWEN_27B.state_bytes(0) == states == pytest.approx(154e6, rel=1e-3)
    assert QWEN_27B.state_bytes(15) - states == pytest.approx(38.5e6, rel=1e-3)
    assert QWEN_27B.rank(2).state_bytes(0) == states / 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_are_as_large_as_the_loaders(resolved: ResolvedConfig, ranks: int) -> None:
    config = replace(resolved.config, tensor_parallel_size=ranks)
    mine = replace(resolved, config=config, num_speculative_tokens=7)
    assert target_shape(resolved.target).rank(ranks).state_bytes(7) == state_bytes(mine)


def test_states_take_at_most_half_of_the_memory_for_pages_and_states(resolved: ResolvedConfig) -> None:
    each = state_bytes(resolved)
    assert affordable_states(resolved, 1000 * each) == 12  # two for each request
    assert affordable_states(resolved, 10 * each) == 5
    assert affordable_states(replace(resolved, config=replace(resolved.config, num_states=3)), 10 * each) == 3
    sizes = page_bytes(resolved)
    assert affordable_pages(resolved, sizes, 40 * sizes[0] + 5 * each, 5 * each) == (40,)
    with pytest.raises(ConfigError, match=f"next to {5 * each} bytes of recurrent states"):
        affordable_pages(resolved, sizes, 5 * each + sizes[0], 5 * each)


def test_requests_with_states_leave_room_for_fewer_of_them() -> None:
    room = estimate_memory(PAIR, GPUS["h200"], ONE, DEMAND)
    assert room.state_bytes == 2 * QWEN_27B.state_bytes(0) and room.num_states == 2 * room.max_num_seqs
    each, free = DEMAND.context * QWEN_27B.kv_bytes, room.kv_bytes + room.max_num_seqs * room.state_bytes
    assert room.largest_batch == free // (each + room.state_bytes) < MAX_NUM_SEQS
    no_states = replace(PAIR, target=replace(QWEN_27B, layers=(FULL,) * 64))
    assert estimate_memory(no_states, GPUS["h200"], ONE, DEMAND).num_states is None


def test_a_step_reads_and_writes_each_state_once_however_long_its_context() -> None:
    gpu = GPUS["h200"]
    times = StepTimes(PAIR, gpu, ONE)
    more_s = times.verify(33, 1, 0).bytes - times.verify(32, 1, 0).bytes
    states_s = 2 * QWEN_27B.state_bytes(0) / gpu.device.bytes_per_s
    assert more_s == pytest.approx(states_s + QWEN_27B.kv_bytes / gpu.device.bytes_per_s, rel=0.02)


def test_a_simulated_engine_has_the_planned_states() -> None:
    room = replace(estimate_memory(PAIR, GPUS["h200"], ONE, DEMAND), largest_batch=2)
    engine = simulated_engine(PAIR, room, DEMAND, lambda plan: StepTimings(verify_s=1e-3)).engine
    engine.add_request(simulated_request(0, 100, 5))
    engine.step()
    assert engine.stats().running == 1 and engine.stats().kv_usage == 1 / 4  # of its states
