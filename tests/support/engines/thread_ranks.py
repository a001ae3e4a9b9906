"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import numpy as np
import torch
from manta.actors.targets.loading.rank_loader import load_runner
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.actors.targets.runners.drafts.draft_source import NoDrafts
from manta.actors.targets.runners.runner_interface import Runner
from manta.cluster.config import EngineConfig

from support.checkpoints.tiny import TINY_VOCAB
from support.engines.steps import Steps


class ThreadRanks:
    """A rendezvous of threads that act as ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=600)
        self._shown: list[torch.Tensor] = [torch.empty(0)] * world_size

    def meet(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors; returns when every rank has read them."""
        self._shown[rank] = tensor.clone()
        self._barrier.wait()
        everybody = [t.clone() for t in self._shown]
        self._barrier.wait()
        return everybody

    def run(self, work: Callable[[ThreadRank], object]) -> list:
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(work, [ThreadRank(self, rank) for rank in range(self.world_size)]))


class ThreadRank:
    """A `Communicator` over `ThreadRanks`, which as NCCL takes contiguous tensors alone; gloo takes any."""

    peer_buffers = None

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self.rank = ranks, rank
        self.world_size = ranks.world_size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        return tensor.copy_(reduce(torch.add, self._ranks.meet(self.rank, tensor)))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._ranks.meet(self.rank, tensor), dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        return tensor.copy_(self._ranks.meet(self.rank, tensor)[source])


def tokens_by_steps(runner: Runner, prompts: list[list[int]], num_steps: int) -> list[list[int]]:
    """Greedy tokens of all prompts, prefilled together; with drafts once prompts are done."""
    assert isinstance(runner, CpuModelRunner)
    steps = Steps(len(prompts), num_groups=len(runner.states.page_tables_GSP))
    slots = list(range(len(prompts)))
    admitted = [steps.admit(s, p) for s, p in enumerate(prompts)]
    result = runner.execute(steps.plan(slots, [0] * len(slots), [len(p) for p in prompts], admitted=admitted))
    found = [r[r >= 0].tolist() for r in result.token_ids]
    drafts = 0 if isinstance(runner.drafts, NoDrafts) else 3
    for _ in range(num_steps):
        computed = [len(p) + len(f) - 1 for p, f in zip(prompts, found, strict=True)]
        result = runner.execute(steps.plan(slots, computed, [1 + drafts] * len(slots), [drafts] * len(slots)))
        for known, row in zip(found, result.token_ids, strict=True):
            known += row[row >= 0].tolist()
    return found


PROMPTS = [np.random.default_rng(5).integers(0, TINY_VOCAB - 1, n).tolist() for n in (30, 3, 17)]


def tokens_of_ranks(config: EngineConfig, num_steps: int) -> list[list[int]]:
    """Greedy tokens of PROMPTS by the ranks of a target, which all give the same."""
    ranks = ThreadRanks(config.tensor_parallel_size)
    first, *others = ranks.run(lambda rank: tokens_by_steps(load_runner(config, rank)[0], PROMPTS, num_steps))
    assert others == [first] * (ranks.world_size - 1), "ranks differ"
    return first


class OtherRank:
    """The communicator of the first of two ranks; the second one has shown its tensor already."""

    rank, world_size = 0, 2

    def __init__(self, shown: torch.Tensor) -> None:
        self._shown = shown

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        assert tensor.shape == self._shown.shape and tensor.dtype is self._shown.dtype
        return torch.cat((tensor, self._shown), dim=dim)
