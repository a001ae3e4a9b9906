"""Starts a rank of an engine on a pretended GPU, with random weights that take no memory.

Import it after `pretended_gpu.pretend`: what it imports looks for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...actors.targets.loading import rank_loader
from ...actors.targets.loading.checkpoint_models import Checkpoints
from ...actors.targets.loading.operator_factory import make_fused_sum
from ...actors.targets.loading.resolved_config import resolve_config
from ...actors.targets.model.tensor_parallel import Communicator, SingleRank
from ...actors.targets.runners import cuda_graphs
from ...actors.workers.comm.custom_all_reduce import compile_fused
from ...cluster.config import EngineConfig
from ...cluster.hardware.step_time import FUSED_SUM_BYTES, FUSED_SUM_ROWS, FUSED_SUM_WIDTH
from ...drafter.compute.gpu_triton.linear import gemm_choice
from ...drafter.compute.gpu_triton.linear.gemm_choice import MeasuredChoice
from ...drafter.compute.gpu_triton.linear.projections import OwnProjection, TorchProjection, Use
from ...drafter.compute.memory.peer_buffers import FusedSum, PeerBuffers
from .pretended_gpu import PretendedGpu, fake_tensors


def start_first_rank(config: EngineConfig, gpu: PretendedGpu) -> None:
    """Load rank 0 and run what it captures, as a worker does; kernels do not depend on a rank's number.

    Raises ConfigError and CheckpointError before it begins.
    """
    pretend_values()
    cuda_graphs._capture = _capture_nothing
    resolved, num_ranks = resolve_config(config), config.tensor_parallel_size
    with fake_tensors(gpu):
        ranks = PretendedRank(0, num_ranks) if num_ranks > 1 else SingleRank()
        if isinstance(ranks, PretendedRank):
            ranks.use_peer_memory(resolved.dtype, make_fused_sum(resolved))
        rank_loader.start_runner(resolved, Checkpoints(), ranks)


class PretendedRank:
    """One of several ranks, whose peers have what it has."""

    peer_buffers: PeerBuffers | None = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def use_peer_memory(self, dtype: torch.dtype, fused: FusedSum | None) -> None:
        """Sum few rows by `fused` from now on, as ranks do whose GPUs can read each other's memory."""
        values_P, signals_P = (torch.empty(self.world_size, dtype=torch.int64, device="cuda") for _ in "vs")
        launches = torch.zeros(FUSED_SUM_ROWS, dtype=torch.int32, device="cuda")
        ranks, sizes = (self.rank, self.world_size), (FUSED_SUM_WIDTH, FUSED_SUM_BYTES // dtype.itemsize)
        buffers = PeerBuffers(*ranks, dtype, values_P, signals_P, launches, *sizes)
        if fused is not None:
            compile_fused(fused, buffers)
            self.peer_buffers = buffers

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([tensor] * self.world_size, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor


def pretend_values() -> None:
    """Let a start go on where it depends on values of the device: measured products, what ranks agree on."""
    MeasuredChoice._agree = _launch_both
    rank_loader.smallest = _own_value


def _launch_both(
    self: MeasuredChoice, use: Use, own: OwnProjection, other: TorchProjection, dtype: torch.dtype
) -> list[bool]:
    """`MeasuredChoice._agree` without a clock: choose our product, at every number of rows.

    Both products are launched as in a measurement, because a kernel is compiled by its first launch.
    """
    measured = gemm_choice.measured_rows(own)
    if self._ranks is not None:  # `_agree` exchanges the choices, and the rehearsal records it
        self._ranks.broadcast(torch.empty(len(measured), dtype=torch.int32, device="cuda"))
    for projection in (own, other):
        for rows in measured:
            gemm_choice._call(use, projection, own, rows, dtype)()
    return [True] * len(measured)


def _own_value(
    find: Callable[[], Sequence[int]], count: int, communicator: Communicator, device: Any
) -> tuple[int, ...]:
    """`rank_loader.smallest` of equal ranks, which reads no value from the device."""
    found = tuple(find())
    communicator.all_gather(torch.empty((1, 1 + count), dtype=torch.int64, device="cuda"), dim=0)
    return found


def _capture_nothing(launch: object, pool: object) -> torch.cuda.CUDAGraph:
    """Return an empty graph. What it would hold has just been run once, so no kernel is new in it."""
    return torch.cuda.CUDAGraph()
