"""Small sums between GPUs through each other's memory, where it works; the rest is NCCL's.

A decoding step of a split target sums a few KB twice per layer. NCCL takes 20 to 30 microseconds for each,
one kernel that reads the peers' buffers half of that (`one_shot_all_reduce` of torch's symmetric memory),
and that kernel puts no node of the host into a CUDA graph. It needs all ranks' devices visible in every
process and peer access between them; where anything is missing, or a sum comes out wrong, no rank uses it.
Used by `process_group.py`.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

# Beyond it every rank reads more from its peers than NCCL's rings would: 16 rows of 4096 in bf16 are 128 KiB.
MAX_BYTES = 512 * 1024


class PeerSum:
    """Sums over one group. Use `of`: the constructor fails where peer memory is missing."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory  # alpha, and CUDA's: not on a CPU

        self._group_name = group.group_name
        self._buffer = symmetric_memory.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._buffer, self._group_name)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> PeerSum | None:
        """Collective: all ranks get one, tried and found right, or none of them does."""
        if device.type != "cuda":
            return None
        peers, why = None, "a sum came out wrong"
        works_1 = torch.zeros(1, device=device)
        try:
            peers = cls(group, device, dtype)
            works_1 += peers._is_right(group)
        except (RuntimeError, ImportError, AttributeError) as error:  # an alpha interface may also be gone
            why = str(error).split("\n", 1)[0]
        dist.all_reduce(works_1, op=dist.ReduceOp.MIN, group=group)
        if works_1.item():
            return peers
        logger.info("sums between GPUs go through NCCL alone: symmetric memory does not work here (%s)", why)
        return None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of the kind and size this is for."""
        return tensor.dtype is self._buffer.dtype and tensor.numel() <= self._buffer.numel()

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place. `tensor` is contiguous."""
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(self._buffer, tensor, "sum", self._group_name, tensor)

    def _is_right(self, group: dist.ProcessGroup) -> bool:
        """One sum of small whole numbers, which no order of adding can round."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        ones = torch.arange(4096, device=self._buffer.device).remainder_(8).to(self._buffer.dtype)
        total = ones * (rank + 1)
        self.add_up(total)
        return torch.equal(total, ones * (world_size * (world_size + 1) // 2))
