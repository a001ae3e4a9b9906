"""Tensors between workers: torch.distributed, which this file and `peer_memory.py` alone name.

NCCL between GPUs, gloo between CPUs. Rank 0 opens a store on a free port (`open_store`), the others join it
(`connect`). Every worker belongs to the joint group; the target ranks have one of their own, and a split
drafter one with target rank 0:

    rank      0 .. TP-1        TP
              target group     |
              joint group ─────┤            drafts come by broadcast from the drafter
              └ rank 0 ─ link ─┘            tokens and features go by broadcast from rank 0

A group of one process needs no torch.distributed: its communicator does nothing. Small sums between GPUs may
take a shorter way (`peer_memory.py`). Plans and results do not go this way: that is `channel.py`. Used by
`target_worker.py` and `drafter_worker.py`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from .peer_memory import PeerSum

Store = TCPStore
LOOPBACK = "127.0.0.1"
COLLECTIVE_TIMEOUT_S = 300.0

# From torch 2.13 on it has this name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """The collectives of one group, on contiguous tensors of `device`. With one rank they do nothing."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self._group = group
        self.rank = dist.get_rank(group) if group else 0
        self.world_size = dist.get_world_size(group) if group else 1
        self._peers: PeerSum | None = None

    def use_peer_memory(self, dtype: torch.dtype) -> None:
        """Between GPUs: sum small tensors of this dtype through peer memory from now on, if it works."""
        if self._group:
            self._peers = PeerSum.of(self._group, self.device, dtype)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self._peers and self._peers.takes(tensor):
            self._peers.add_up(tensor)
        elif self._group:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors of equal shape, joined along `dim` in the order of ranks."""
        if not self._group:
            return tensor
        joined = tensor.new_empty((self.world_size * tensor.shape[0], *tensor.shape[1:]))
        _all_gather(joined, tensor.contiguous(), group=self._group)
        return joined if dim == 0 else torch.cat(joined.chunk(self.world_size), dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of rank `source` of this group, in place."""
        if self._group:
            dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """One worker's groups. `target` is None on a split drafter, `link` on all but that and target rank 0."""

    joint: Communicator
    target: Communicator | None
    link: Communicator | None

    @property
    def drafter_rank(self) -> int:
        """A split drafter's in the joint group: the last."""
        return self.joint.world_size - 1

    def close(self) -> None:
        """Leave the groups; peers that still wait for this process then fail."""
        if dist.is_initialized():
            dist.destroy_process_group()


def open_store(num_workers: int, host: str = LOOPBACK) -> Store:
    """The meeting point, served on a free port of `host`; keep it, and give its `.port` to the others."""
    # TCPStore by itself would listen on every interface.
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        return Store(
            host,
            port,
            num_workers,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


def connect(
    *,
    rank: int,
    num_targets: int,
    split_drafter: bool,
    device: torch.device,
    store: Store | int,
    host: str = LOOPBACK,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> ProcessGroups:
    """Join the groups; returns when all workers have. `store`: rank 0's own, or its port for the others."""
    num_workers = num_targets + split_drafter
    timeout = timedelta(seconds=timeout_s)
    if num_workers == 1:
        return ProcessGroups(Communicator(device), Communicator(device), None)
    if host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks what the host's name resolves to
    if isinstance(store, int):
        store = Store(host, store, num_workers, is_master=False, timeout=timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num_workers,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    joint = Communicator(device, dist.group.WORLD)
    return ProcessGroups(
        joint=joint,
        target=_subgroup(range(num_targets), rank, joint),
        link=_subgroup((0, num_targets), rank, joint) if split_drafter else None,
    )


def _subgroup(ranks: Sequence[int], rank: int, joint: Communicator) -> Communicator | None:
    """A group of some ranks; all workers must call this, and those outside get None.

    Of all it is the joint one: a group of its own would be a second set of buffers on every GPU.
    """
    if len(ranks) == joint.world_size:
        return joint
    group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
    if rank not in ranks:
        return None
    assert not isinstance(group, int), "new_group gives a number only to those outside"
    return Communicator(joint.device, group)
