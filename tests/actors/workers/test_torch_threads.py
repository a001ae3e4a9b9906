"""PyTorch's threads on few cores: fewer of them, the same bits in fp32, and all of them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from manta.actors.system import torch_threads
from manta.actors.system.torch_threads import TorchThreads
from manta.drafter.compute.cpu_numba import thread_clock
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from support.waiting import wait_until


class Machine:
    """A machine as `TorchThreads` sees it: seconds, interruptions so far, and whether a core is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.interruptions, self.has_cores = 0.0, 0.0, False
        monkeypatch.setattr(torch_threads, "time", self)
        monkeypatch.setattr(torch_threads, "_interruptions", lambda: int(self.interruptions))
        monkeypatch.setattr(thread_clock, "finds_a_core", lambda: self.has_cores)

    def monotonic(self) -> float:
        return self.now_s

    def run(self, threads: TorchThreads, *, interruptions_per_s: float = 0.0) -> int:
        """Run steps for two seconds; return the number of threads."""
        for _ in range(40):
            self.now_s += 0.05
            self.interruptions += 0.05 * interruptions_per_s
            threads.use()
            assert torch.get_num_threads() == threads.size
        return threads.size


def test_two_threads_that_are_interrupted_become_one_and_two_again(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        machine, threads = Machine(monkeypatch), TorchThreads()
        assert machine.run(threads, interruptions_per_s=40) == 2
        assert machine.run(threads, interruptions_per_s=400) == 1
        assert machine.run(threads) == 1, "no trial finds a core"
        machine.has_cores = True
        wait_until(lambda: machine.run(threads) == 2)
        torch.set_num_threads(3)  # by another library
        assert machine.run(threads) == 2
    finally:
        torch.set_num_threads(before)


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
