"""All orders in which a stream can make the copies of steps in flight (`support/explorer`).

What the explorer runs is recorded from the runner. Each planted fault must be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from support.engines.devices import ON_GPU
from support.explorer.machine import Explorer, Op, Read, Thread, Wait, Write, changed

pytest.importorskip("triton")
if ON_GPU:
    pytest.skip("operations are recorded in Triton's interpreter", allow_module_level=True)

from manta.actors.targets.runners.gpu_runner import GpuModelRunner
from manta.drafter.step.gpu_triton.inputs import transfers
from manta.drafter.step.gpu_triton.inputs.transfers import MAX_IN_FLIGHT, PendingResult, Upload
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines.steps import Steps, open_runner, short_warm_up
from support.explorer.recorded_transfers import Trace

NUM_STEPS = 6  # each slot of a ring is used again


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Trace]:
    """Record steps of two requests, two steps in flight."""
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = make_tiny_target(folder / "target", "qwen3", seed=5), make_tiny_drafter(folder)
    small = {"max_num_seqs": 2, "max_model_len": 48, "num_pages": 64, "page_size": 16}

    def record_steps() -> Trace:
        with short_warm_up():
            runner, _ = open_runner(target, drafter, attention_backend="triton", **small)
        assert isinstance(runner, GpuModelRunner)
        trace, steps = Trace(), Steps(2, 48)
        trace.watch(runner)
        enter = [steps.admit(slot, prompt) for slot, prompt in enumerate(([5, 6, 7], [9] * 4))]
        trace.submit(runner, steps.plan([0, 1], [0, 0], [3, 4], admitted=enter))
        for _ in range(1, NUM_STEPS):
            trace.submit(runner, steps.plan([0, 1], [-1, -1], [4, 4], [3, 3]))
            trace.collect(runner)
        trace.collect(runner)
        return trace

    return record_steps


@pytest.fixture(scope="module")
def trace(record: Callable[[], Trace]) -> Trace:
    return record()


def test_no_pinned_slot_is_used_before_its_copy_is_done(trace: Trace) -> None:
    uploads = {op.place for op in trace.stream if isinstance(op, Read)}
    outcomes = {op.place for op in trace.stream if isinstance(op, Write)}
    assert len(uploads) == 4 and len(outcomes) == MAX_IN_FLIGHT
    found = Explorer(trace.threads(MAX_IN_FLIGHT)).explore()
    assert found.fault is None and found.num_states > 3000


def done_for_ever(threads: list[Thread]) -> list[Thread]:
    """Take an event that was recorded once to be done, also when it is recorded again."""

    def of_first_record(op: Op) -> Op:
        if isinstance(op, Wait) and op.counter.startswith("copied"):
            return op._replace(at_least=min(op.at_least, 1))
        return op

    return changed(threads, of_first_record)


def events_before_copies(threads: list[Thread]) -> list[Thread]:
    """Record each event before the copy that it is for."""
    *host, stream = threads
    ops = list(stream.ops)
    for i in range(3, len(ops), 4):
        ops[i - 2], ops[i] = ops[i], ops[i - 2]
    return [*host, replace(stream, ops=ops)]


@pytest.mark.parametrize(
    ("plant", "max_in_flight"),
    [
        (done_for_ever, MAX_IN_FLIGHT),
        (events_before_copies, MAX_IN_FLIGHT),
        pytest.param(list, MAX_IN_FLIGHT + 1, id="one slot too few"),
    ],
)
def test_faults_of_events_are_found(
    plant: Callable[[list[Thread]], list[Thread]], max_in_flight: int, trace: Trace
) -> None:
    assert Explorer(plant(trace.threads(max_in_flight))).explore().fault is not None


def next_slot(self: Upload) -> object:
    self._slot_index = (self._slot_index + 1) % len(self._slots)
    return self._slots[self._slot_index]


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        pytest.param(transfers, "MAX_IN_FLIGHT", MAX_IN_FLIGHT - 1, id="one slot of outcomes too few"),
        pytest.param(Upload, "_next_slot", next_slot, id="no wait before a slot is written"),
        pytest.param(PendingResult, "wait", lambda self: self.values, id="no wait for an outcome"),
    ],
)
def test_faults_of_the_runner_are_found(
    where: object, name: str, fault: object, record: Callable[[], Trace]
) -> None:
    with patch.object(where, name, fault):
        trace = record()
    assert Explorer(trace.threads(MAX_IN_FLIGHT)).explore().fault is not None
