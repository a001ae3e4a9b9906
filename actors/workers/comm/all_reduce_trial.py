"""A process that tries the small all-reduce as one rank; started by `jobs/doctor/all_reduce_check.py`."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist

from . import custom_all_reduce
from .custom_all_reduce import CustomAllReduce
from .process_group import connect

TIMEOUT_S = 120.0


def run_rank() -> None:
    """Join the group, report, and leave."""
    rank, num_ranks, port, device_type = json.loads(sys.argv[1])
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
    group = connect(rank=rank, world_size=num_ranks, device=device, store=port, timeout_s=TIMEOUT_S)
    print(json.dumps(report_of_rank(device)), flush=True)
    group.close()


def report_of_rank(device: torch.device) -> dict[str, Any]:
    """Try it over the default group. Collective."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(_reason(record))
    custom_all_reduce.logger.addHandler(handler)
    assert dist.group.WORLD is not None, "connected"
    peers = CustomAllReduce.of(dist.group.WORLD, device, torch.bfloat16)
    custom_all_reduce.logger.removeHandler(handler)
    return {
        "works": peers is not None,
        "multicast": peers is not None and peers.has_multicast,
        "reason": warnings[-1] if warnings else "",
    }


def _reason(record: logging.LogRecord) -> str:
    """Return the reason in a warning that says what follows from it."""
    return str(record.args[0]) if isinstance(record.args, tuple) and record.args else record.getMessage()
