"""Tensors between the target's ranks. Only this file and `custom_all_reduce.py` use torch.distributed.

NCCL between GPUs, gloo between CPUs. Rank 0 opens a store on a free port (`open_store`), and the others join
it (`connect`). A single rank needs no torch.distributed. Plans and results use `shm/step_channel.py` instead.
A remote drafter is in no group, as a group cannot be repaired after the death of a member.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ....drafter.compute.memory.peer_buffers import FusedSum, PeerBuffers
from .custom_all_reduce import CustomAllReduce

Store = TCPStore
LOOPBACK = "127.0.0.1"
# The first one waits for the rank whose disk is slowest. A hang while serving is noticed by the step's watch.
COLLECTIVE_TIMEOUT_S = 1800.0

# Its name from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupCommunicator:
    """The collectives of one group, on contiguous tensors of `device`. With one rank they do nothing."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self._group = group
        self.rank = dist.get_rank(group) if group else 0
        self.world_size = dist.get_world_size(group) if group else 1
        self._peers: CustomAllReduce | None = None

    @property
    def peer_buffers(self) -> PeerBuffers | None:
        return None if self._peers is None else self._peers.buffers

    def use_peer_memory(self, dtype: torch.dtype, fused: FusedSum | None = None) -> None:
        """Sum small tensors of this dtype through GPU peer memory from now on, if it works.

        `fused`: the kernel to which `peer_buffers` are given if it works, too.
        """
        if self._group:
            self._peers = CustomAllReduce.of(self._group, self.device, dtype, fused)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._peers and self._peers.takes(tensor):
            self._peers.add_up(tensor)
        elif self._group:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if not self._group:
            return tensor
        joined = tensor.new_empty((self.world_size * tensor.shape[0], *tensor.shape[1:]))
        _all_gather(joined, tensor.contiguous(), group=self._group)
        return joined if dim == 0 else torch.cat(joined.chunk(self.world_size), dim=dim)

    def close(self) -> None:
        """Leave the group; peers that still wait for this process then fail."""
        if self._group:
            dist.destroy_process_group()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if self._group:
            dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor


def joined() -> ProcessGroupCommunicator:
    """Return the group that another library, such as Ray Train, has set up, or a single rank."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ProcessGroupCommunicator(device, dist.group.WORLD if dist.is_initialized() else None)


def open_store(num_ranks: int) -> Store:
    """Serve the meeting point on a free loopback port; keep it, and give its `.port` to the others."""
    # TCPStore by itself would listen on every interface.
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        return Store(
            LOOPBACK,
            port,
            num_ranks,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


def connect(
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    store: Store | int,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> ProcessGroupCommunicator:
    """Join the group and wait for all ranks. `store` is rank 0's own, or for the others its port."""
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        return ProcessGroupCommunicator(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo uses the address of the host's name
    if isinstance(store, int):
        store = Store(LOOPBACK, store, world_size, is_master=False, timeout=timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return ProcessGroupCommunicator(device, dist.group.WORLD)
