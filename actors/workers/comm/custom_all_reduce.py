"""Small all-reduces between GPUs through peer memory, where it works; NCCL does the rest.

A decoding step of a tensor-parallel target sums a few KB twice per layer. NCCL takes 20 to 30 microseconds
for each sum; one kernel on torch's symmetric memory takes half, and adds no host node to a CUDA graph. With
NVLink multicast each rank sums a slice and sends it to all (`multimem_all_reduce_`), so all get the same bits
by construction; without it each reads all peers' buffers (`one_shot_all_reduce_copy_out`). Every process must
see all ranks' devices, with peer access. If anything is missing or wrong on one rank, all ranks use NCCL.

A kernel that is given gets the ranks' memory (`buffers`): it sums few rows in one launch with the residual
and the norm after them.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ....cluster.hardware.step_time import FUSED_SUM_BYTES, FUSED_SUM_ROWS, FUSED_SUM_WIDTH
from ....drafter.compute.memory.peer_buffers import FusedSum, PeerBuffers

logger = logging.getLogger(__name__)

# Above this size every rank reads more from its peers than with NCCL's rings. For scale: 16 rows of 4096 in
# bf16 are 128 KiB.
MAX_BYTES = 512 * 1024
_CHECKED_VALUES = 4096
_TRIED_ROWS, _TRIED_WIDTH, _TRIED_SPINS = 3, 1024, 2**22

T = TypeVar("T")


class CustomAllReduce:
    """Sums over one group; made by `of`, with `MAX_BYTES` of symmetric memory after its rendezvous."""

    def __init__(self, buffer: torch.Tensor, group_name: str, *, has_multicast: bool) -> None:
        self._buffer, self._group_name, self.has_multicast = buffer, group_name, has_multicast
        self.buffers: PeerBuffers | None = None

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, fused: FusedSum | None = None
    ) -> CustomAllReduce | None:
        """Return a working instance on all ranks, or None on all ranks; with `buffers` if `fused` works.

        Collective.
        """
        return cls._tried(group, device, dtype, fused) if device.type == "cuda" else None

    @classmethod
    def _tried(
        cls, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, fused: FusedSum | None
    ) -> CustomAllReduce | None:
        """Connect the ranks and test their sums; None, with a warning, if a step fails on any rank.

        Fused sums are tested, too, and left out alone if only they fail.
        """
        reason = "it failed on another rank"

        def on_all_ranks(step: Callable[[], T]) -> T | None:
            """Return what a step returns; None if it raises on any rank, so that no rank waits for it."""
            nonlocal reason
            result, works_1 = None, torch.zeros(1, device=device)
            try:
                result = step()
                works_1 += 1
            # An alpha interface may change.
            except (RuntimeError, ImportError, AttributeError, TypeError) as error:
                reason = str(error).split("\n", 1)[0]
            dist.all_reduce(works_1, op=dist.ReduceOp.MIN, group=group)
            return result if works_1.item() else None

        def allocated() -> tuple[Any, torch.Tensor]:  # Any: a module that only torch with CUDA has
            memory = importlib.import_module("torch.distributed._symmetric_memory")
            return memory, memory.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device)

        def connected(memory: Any, buffer: torch.Tensor) -> CustomAllReduce:
            handle = memory.rendezvous(buffer, group.group_name)
            return cls(buffer, group.group_name, has_multicast=bool(handle.multicast_ptr))

        found = on_all_ranks(allocated)
        if found is not None:
            peers = on_all_ranks(lambda: connected(*found))
            if peers is not None:
                peers._agree_on_multicast(group)
            total = None if peers is None else on_all_ranks(lambda: peers._test_sums(group))
            if peers is not None and total is not None and on_all_ranks(lambda: _check_same(total, group)):
                if fused is None:
                    return peers
                shared = on_all_ranks(lambda: _share_buffers(found[0], group, dtype, device))
                random = None
                if shared is not None and on_all_ranks(lambda: compile_fused(fused, shared)):
                    random = on_all_ranks(lambda: _test_fused(fused, shared))
                if random is not None and on_all_ranks(lambda: _check_same(random, group)):
                    peers.buffers = shared
                else:
                    logger.warning("sums between GPUs are not fused with the norms after them (%s)", reason)
                return peers
        logger.warning(
            "sums between GPUs only use NCCL, which adds about 1 ms to a step: symmetric memory does not "
            "work here (%s)",
            reason,
        )
        return None

    def takes(self, tensor: torch.Tensor) -> bool:
        num_bytes = tensor.numel() * tensor.element_size()
        return tensor.dtype is self._buffer.dtype and num_bytes <= MAX_BYTES and num_bytes % 4 == 0

    def add_up(self, tensor: torch.Tensor) -> None:
        view, ops = self._buffer[: tensor.numel()].view_as(tensor), torch.ops.symm_mem
        if self.has_multicast:
            view.copy_(tensor)
            ops.multimem_all_reduce_(view, "sum", self._group_name)
            tensor.copy_(view)
        else:
            ops.one_shot_all_reduce_copy_out(view, tensor, "sum", self._group_name, tensor)

    def _agree_on_multicast(self, group: dist.ProcessGroup) -> None:
        """Use multicast if all ranks have it: ranks in different operators would wait for each other."""
        has_it_1 = torch.tensor([int(self.has_multicast)], device=self._buffer.device)
        dist.all_reduce(has_it_1, op=dist.ReduceOp.MIN, group=group)
        self.has_multicast = bool(has_it_1.item())

    def _test_sums(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the sum of random values. Raises RuntimeError if small integers do not sum exactly."""
        device, dtype = self._buffer.device, self._buffer.dtype
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        integers = torch.arange(_CHECKED_VALUES, device=device).remainder_(8).to(dtype)
        total = integers * (rank + 1)
        self.add_up(total)
        own = torch.Generator().manual_seed(rank)
        random = torch.randn(_CHECKED_VALUES, generator=own).to(device, dtype)
        self.add_up(random)
        if not torch.equal(total, integers * (world_size * (world_size + 1) // 2)):
            raise RuntimeError("a sum was wrong")
        return random


def _share_buffers(
    memory: Any, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> PeerBuffers:
    """Return memory for fused sums, usable once all ranks have it. Collective."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    values_bytes = 2 * FUSED_SUM_ROWS * FUSED_SUM_WIDTH * dtype.itemsize  # two halves; then the signals
    size = values_bytes // torch.int32.itemsize + FUSED_SUM_ROWS * world_size
    own = memory.empty(size, dtype=torch.int32, device=device).zero_()
    handle = memory.rendezvous(own, group.group_name)
    views = [handle.get_buffer(peer, (size,), torch.int32) for peer in range(world_size)]
    values_P = torch.tensor([view.data_ptr() for view in views], device=device)
    launches = torch.zeros(FUSED_SUM_ROWS, dtype=torch.int32, device=device)
    return PeerBuffers(
        rank,
        world_size,
        dtype,
        values_P,
        values_P + values_bytes,
        launches,
        FUSED_SUM_WIDTH,
        FUSED_SUM_BYTES // dtype.itemsize,
        (handle, own, *views),
    )


def compile_fused(fused: FusedSum, buffers: PeerBuffers) -> bool:
    """Run the kernel once without waiting for other ranks, which may take longer to compile it."""
    ones = torch.ones(_TRIED_ROWS, _TRIED_WIDTH, dtype=buffers.dtype, device=buffers.values_P.device)
    fused(ones, buffers.bounded(0), ones, ones[0], 1e-6)
    return True


def _test_fused(fused: FusedSum, buffers: PeerBuffers) -> torch.Tensor:
    """Return the fused sum of random values. Raises RuntimeError if small integers do not sum exactly."""
    device, ranks, shape = buffers.values_P.device, buffers.world_size, (_TRIED_ROWS, _TRIED_WIDTH)
    residual = torch.zeros(shape, dtype=buffers.dtype, device=device)
    weight, bounded = torch.ones_like(residual[0]), buffers.bounded(_TRIED_SPINS)
    integers = torch.arange(residual.numel(), device=device).remainder_(8).to(buffers.dtype).view(shape)
    for turn in range(1, 4):  # each half of the buffers, and one again
        total, _ = fused(integers * (buffers.rank + turn), bounded, residual, weight, 1e-6)
        if not torch.equal(total, integers * (ranks * (ranks - 1) // 2 + ranks * turn)):
            raise RuntimeError("a fused sum was wrong")
    random = torch.randn(shape, generator=torch.Generator().manual_seed(buffers.rank))
    return fused(random.to(device, buffers.dtype), bounded, residual, weight, 1e-6)[0]


def _check_same(total: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Raise RuntimeError unless all ranks have the same bits: routers and samplers rely on it. Collective."""
    lowest, highest = (total.to(torch.float32, copy=True) for _ in range(2))
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    if not torch.equal(lowest, highest):
        raise RuntimeError("ranks got different sums")
    return True
