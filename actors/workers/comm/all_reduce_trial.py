"""A process that tries small sums over ranks as one of them; started by `jobs/doctor/all_reduce_check.py`.

It tries both ways of `custom_all_reduce.py`: sums alone, and with the residual and the norm after them.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist

from ....drafter.compute.memory.peer_buffers import FusedSum
from . import custom_all_reduce
from .custom_all_reduce import CustomAllReduce
from .process_group import connect

TIMEOUT_S = 120.0


def run_rank() -> None:
    """Join the group, report, and leave."""
    from ....drafter.compute.gpu_triton.linear.all_reduce_norm import sum_add_rms_norm  # needs Triton

    rank, num_ranks, port, device_type = json.loads(sys.argv[1])
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
    group = connect(rank=rank, world_size=num_ranks, device=device, store=port, timeout_s=TIMEOUT_S)
    print(json.dumps(report_of_rank(device, sum_add_rms_norm)), flush=True)
    group.close()


def report_of_rank(device: torch.device, fused: FusedSum) -> dict[str, Any]:
    """Try sums over the default group, alone and by the kernel `fused`. Collective."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(_reason(record))
    custom_all_reduce.logger.addHandler(handler)
    assert dist.group.WORLD is not None, "connected"
    peers = CustomAllReduce.of(dist.group.WORLD, device, torch.bfloat16, fused)
    custom_all_reduce.logger.removeHandler(handler)
    return {
        "works": peers is not None,
        "multicast": peers is not None and peers.has_multicast,
        "fuses": peers is not None and peers.buffers is not None,
        "reason": warnings[-1] if warnings else "",
    }


def _reason(record: logging.LogRecord) -> str:
    """Return the reason in a warning that says what follows from it."""
    return str(record.args[0]) if isinstance(record.args, tuple) and record.args else record.getMessage()
