"""PyTorch's threads on few cores: fewer of them, the same bits in fp32, and all of them again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from manta.drafter.compute.cpu_numba.backend import NumbaBackend

SCRIPT = """
import os, time, torch
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(cores)})  # threads that are made from here on have this core alone
torch.set_num_threads(2)
from manta.actors.system.torch_threads import TorchThreads
threads = TorchThreads()
weight, x = torch.randn(512, 512), torch.randn(64, 512)

def step():
    threads.use()
    assert torch.get_num_threads() == threads.size
    for _ in range(20):
        torch.relu(x @ weight)

def run_until(size):
    deadline_s = time.monotonic() + 120.0
    while threads.size != size:
        assert time.monotonic() < deadline_s, f"there are {threads.size} threads"
        step()
        time.sleep(0.005)  # leaves the core to a thread on trial

assert threads.size == 2
busy = os.fork()
if busy == 0:
    while os.getppid() != 1:
        pass
run_until(1)
os.kill(busy, 9)
os.waitpid(busy, 0)
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), cores)
if len(cores) > 1:
    run_until(2)
torch.set_num_threads(3)  # set by another library
step()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pins threads to cores")
@pytest.mark.quiet
def test_two_threads_that_are_interrupted_become_one_and_two_again():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], timeout=280, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def results_by_threads(compute: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3, 4):
            torch.set_num_threads(num_threads)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    return results


@pytest.mark.parametrize("num_rows", [1, 4, 16, 17, 64, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 192), (256, 1024), (4096, 256), (1024, 4096)])
@pytest.mark.one_in(2)
def test_in_fp32_a_product_has_the_same_bits_on_any_number_of_threads(
    num_rows: int, outputs: int, inputs: int
):
    linear, x = NumbaBackend().linear(torch.randn(outputs, inputs)), torch.randn(num_rows, inputs)
    first, *others = results_by_threads(lambda: linear(x))
    assert all(result.equal(first) for result in others)


@pytest.mark.parametrize("num_rows", [4, 16, 64, 512])
@pytest.mark.parametrize("num_keys", [64, 512, 1536])
@pytest.mark.one_in(2)
def test_in_fp32_attention_has_the_same_bits_on_any_number_of_threads(num_rows: int, num_keys: int):
    q, k, v = (torch.randn(2, 4, n, 64) for n in (num_rows, num_keys, num_keys))
    mask = torch.ones(num_rows, num_keys, dtype=torch.bool)
    mask[:, -3:] = False
    attend = torch.nn.functional.scaled_dot_product_attention
    first, *others = results_by_threads(lambda: attend(q, k, v, attn_mask=mask))
    assert all(result.equal(first) for result in others)
