"""Small all-reduces between GPUs through peer memory, where it works; NCCL does the rest.

A decoding step of a tensor-parallel target sums a few KB twice per layer. NCCL takes 20 to 30 microseconds
for each sum, while one kernel that reads the peers' buffers (`one_shot_all_reduce` of torch's symmetric
memory) takes half of that and adds no host node to a CUDA graph. It needs all ranks' devices visible in every
process, and peer access between them. If anything is missing, or a test sum is wrong, no rank uses it. Used
by `process_group.py`.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

# Above this size every rank reads more from its peers than with NCCL's rings. For scale: 16 rows of 4096 in
# bf16 are 128 KiB.
MAX_BYTES = 512 * 1024


class CustomAllReduce:
    """Sums over one group. Use `of`: the constructor fails where peer memory is missing."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory  # an alpha interface, for CUDA only

        self._group_name = group.group_name
        self._buffer = symmetric_memory.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._buffer, self._group_name)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> CustomAllReduce | None:
        """Return a working instance on all ranks, or None on all ranks. Collective."""
        if device.type != "cuda":
            return None
        peers, reason = None, "a sum came out wrong"
        works_1 = torch.zeros(1, device=device)
        try:
            peers = cls(group, device, dtype)
            works_1 += peers._sums_correctly(group)
        except (RuntimeError, ImportError, AttributeError) as error:  # an alpha interface may be missing
            reason = str(error).split("\n", 1)[0]
        dist.all_reduce(works_1, op=dist.ReduceOp.MIN, group=group)
        if works_1.item():
            return peers
        logger.info("sums between GPUs only use NCCL: symmetric memory does not work here (%s)", reason)
        return None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the right dtype and is small enough."""
        return tensor.dtype is self._buffer.dtype and tensor.numel() <= self._buffer.numel()

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place."""
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(self._buffer, tensor, "sum", self._group_name, tensor)

    def _sums_correctly(self, group: dist.ProcessGroup) -> bool:
        """Test one sum of small integers, which is exact in any order."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        ones = torch.arange(4096, device=self._buffer.device).remainder_(8).to(self._buffer.dtype)
        total = ones * (rank + 1)
        self.add_up(total)
        return torch.equal(total, ones * (world_size * (world_size + 1) // 2))
