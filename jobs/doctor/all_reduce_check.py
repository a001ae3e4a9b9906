"""Tries the small all-reduce between this machine's GPUs, in a process for each; called by `machine.py`.

An engine with tensor parallelism tries it the same way at its start, and uses NCCL alone if it fails.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

from ...actors.workers.comm import custom_all_reduce
from ...actors.workers.comm.custom_all_reduce import CustomAllReduce
from ...actors.workers.comm.process_group import connect, open_store
from .cases.checks import CheckOutcome

_TIMEOUT_S = 120.0
_MAX_RANKS = 8  # of a node


def try_all_reduce(num_ranks: int, device_type: str = "cuda") -> CheckOutcome:
    """Return how ranks on all devices sum small tensors. Raises RuntimeError if a rank fails."""
    num_ranks = min(num_ranks, _MAX_RANKS)
    store = open_store(num_ranks + 1)  # this process keeps it, and is no rank
    command = [sys.executable, "-c", f"from {__name__} import run_rank; run_rank()"]
    ranks = [
        subprocess.Popen(
            [*command, json.dumps([rank, num_ranks, store.port, device_type])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        ended = [rank.communicate(timeout=_TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for said, errors in ended:  # whatever the exit codes: NCCL may abort while it is torn down
        if not said:
            raise RuntimeError(f"a rank failed: {(errors.strip().splitlines() or ['without a word'])[-1]}")
    return outcome(num_ranks, [json.loads(said.splitlines()[-1]) for said, _ in ended])


def outcome(num_ranks: int, reports: list[dict[str, Any]]) -> CheckOutcome:
    """Return the table's line of the ranks' reports."""
    if all(report["works"] for report in reports):
        way = "NVLink multicast" if reports[0]["multicast"] else "peer memory"
        return CheckOutcome(f"{num_ranks} GPUs by {way}")
    reasons = sorted({report["reason"] for report in reports if report["reason"]})
    return CheckOutcome(f"{num_ranks} GPUs by NCCL alone ({'; '.join(reasons)}): about 1 ms more per step")


def run_rank() -> None:
    """Join the group, report, and leave."""
    rank, num_ranks, port, device_type = json.loads(sys.argv[1])
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
    group = connect(rank=rank, world_size=num_ranks, device=device, store=port, timeout_s=_TIMEOUT_S)
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
