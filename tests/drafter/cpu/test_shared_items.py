"""Threads that are late: others do their items, each item is written once, and no bit depends on it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
import pytest
import torch
from manta.drafter.compute.cpu_fused.gemm_epilogues import PLAIN
from manta.drafter.compute.cpu_fused.operators import PackedLinear
from manta.drafter.compute.cpu_fused.packed_gemm import project_together
from manta.drafter.compute.cpu_fused.threads.shared_items import (
    MOST_ITEMS,
    claim,
    is_complete,
    publish,
    states_per_thread,
)
from manta.drafter.compute.cpu_fused.threads.thread_team import (
    _MAX_THREADS,
    _SIZES,
    _wake_suspended,
    first_phase,
    process_team,
    run,
)
from manta.drafter.compute.cpu_fused.threads.thread_team_size import begin_sizes
from manta.drafter.compute.cpu_fused.tiles.isa_dispatch import has_tiles
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from manta.drafter.compute.cpu_numba.element_ops import Task, pointer
from manta.drafter.compute.cpu_numba.llvm_intrinsics import read_shared, write_shared, yield_core
from manta.drafter.compute.cpu_numba.thread_clock import now_ns
from numba import carray
from support.oracles.random_codes import MATRICES

pytestmark = pytest.mark.skipif(bf16_instructions() is None, reason="this CPU has no products of bf16")

WAIT_NS = 60_000_000_000  # of a late thread for a phase that should end without it
NUM_ARGS, ENDED, GAVE_UP = 13, 11, 12


def _late_task(args, thread, num_threads):
    """y += W (V x): the last thread begins when the first one has ended both products."""
    a = carray(pointer(args, np.int64(0)), (NUM_ARGS,))
    team, rows, size = a[0], a[5], a[6]
    sums = a[7] + thread * a[8]
    phase, begin_ns = first_phase(team), now_ns()
    while thread == num_threads - 1 and read_shared(args + 8 * ENDED) == 0:
        yield_core()
        if now_ns() - begin_ns > WAIT_NS:
            write_shared(args + 8 * GAVE_UP, 1)
            break
    phase = project_together(
        team, thread, num_threads, phase, a[1], a[2], 0, 0, a[3], rows, rows, size, size, PLAIN, sums
    )
    phase = project_together(
        team, thread, num_threads, phase, a[3], a[2], a[9], a[4], a[4], rows, rows, size, size, PLAIN, sums
    )
    if thread == 0:
        write_shared(args + 8 * ENDED, 1)


LATE = Task(_late_task)


@pytest.mark.skipif(has_tiles(), reason="threads with AMX wait for each other")
@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("name", [None, *MATRICES])
def test_phases_end_without_a_late_thread_which_then_writes_nothing(
    name: str | None, rows: int, num_threads: int
) -> None:
    torch.manual_seed(0)
    size = 576
    matrix = torch.randn(size, size).bfloat16() if name is None else MATRICES[name](size, size)
    bias, x, y = (torch.randn(*shape).bfloat16() for shape in ((size,), (rows, size), (rows, size)))
    alone, layer = (PackedLinear(matrix, None, count) for count in (1, num_threads))
    expected = PackedLinear(matrix, bias, 1)(middle := alone(x), y)
    team = process_team()
    team.of(num_threads)
    found, scratch = (
        torch.empty_like(middle),
        torch.empty(layer._scratch_bytes * num_threads, dtype=torch.uint8),
    )
    args = np.zeros(NUM_ARGS, dtype=np.int64)
    args[:11] = (
        team.address, x.data_ptr(), layer._record_1.ctypes.data, found.data_ptr(), y.data_ptr(), rows, size,
        scratch.data_ptr(), layer._scratch_bytes, bias.data_ptr(), 0,
    )  # fmt: skip
    # Waits of earlier tests suspend no thread.
    begin_sizes(team.address + _SIZES, _MAX_THREADS)
    _wake_suspended(team.address)
    run(team.address, LATE.address, args.ctypes.data, num_threads)
    assert args[GAVE_UP] == 0, "the phases waited for the late thread"
    assert found.equal(middle) and y.equal(expected)


def test_an_item_is_written_once_in_each_phase_and_its_parts_in_order() -> None:
    states = np.zeros(1, dtype=np.int64)
    state = states.ctypes.data
    for phase in (0, 1, 7):
        assert not is_complete(state, phase)
        for part in range(3):
            assert claim(state, phase, part)
            publish(state, phase, part, 3)
            assert not claim(state, phase, part), "it has been written"
            assert is_complete(state, phase) == (part == 2)
        assert phase == 0 or not claim(state, phase - 1, 0), "of a thread that is a phase behind"
        assert is_complete(state, phase), "it has changed nothing"


def test_a_thread_that_may_not_write_an_item_waits_until_it_is_written() -> None:
    states = np.zeros(1, dtype=np.int64)
    state = states.ctypes.data
    assert claim(state, 3, 0)
    with ThreadPoolExecutor(1) as other:
        claimed = other.submit(claim, state, 3, 0)
        with pytest.raises(FutureTimeout):
            claimed.result(timeout=0.5)
        publish(state, 3, 0, 1)
        assert not claimed.result()


def test_states_of_threads_share_no_cache_line_and_of_many_items_there_are_none() -> None:
    assert [states_per_thread(count, 2) for count in (1, 16, 17, 96)] == [8, 8, 16, 48]
    assert states_per_thread(MOST_ITEMS, 2) == MOST_ITEMS // 2
    assert states_per_thread(MOST_ITEMS + 1, 2) == 0


SCRIPT = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # all threads have this core alone
from manta import LLM, SamplingParams
from manta.drafter.compute.cpu_fused.threads import thread_team, thread_team_size

def answers(num_threads):
    with LLM(sys.argv[1], dtype="bfloat16", num_threads=num_threads, max_model_len=256, seed=0) as llm:
        team = thread_team.process_team()
        words = team._words[(team.address - team._words.ctypes.data + thread_team._SIZES) // 8 :]
        found = []
        for _ in range(3):
            words[thread_team_size.LIMIT // 8] = 64  # waits suspend threads: begin with all
            thread_team._wake_suspended(team.address)
            prompts = [{"prompt_token_ids": list(range(5, 5 + 9 * n))} for n in range(1, 4)]
            params = SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True, logprobs=3)
            for output in llm.generate(prompts, params):
                steps = output.outputs[0].logprobs
                found.append([(t, each.logprob) for step in steps for t, each in step.items()])
        return found

expected = answers(1)
assert expected == answers(3)
"""


def test_threads_that_interrupt_each_other_on_one_core_compute_the_same_bits() -> None:
    from support.paths import ROOT

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT / "models" / "target")],
        timeout=600,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
