"""Tries the small all-reduce between this machine's GPUs, in a process for each; called by `machine.py`.

An engine with tensor parallelism tries it the same way at its start, with the norms after the sums, and uses
NCCL alone if it fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ...actors.workers.comm import all_reduce_trial
from ...actors.workers.comm.all_reduce_trial import TIMEOUT_S
from ...actors.workers.comm.process_group import open_store
from .cases.checks import CheckOutcome

_MAX_RANKS = 8  # of a node


def try_all_reduce(num_ranks: int, device_type: str = "cuda") -> CheckOutcome:
    """Return how ranks on all devices sum small tensors. Raises RuntimeError if a rank fails."""
    num_ranks = min(num_ranks, _MAX_RANKS)
    store = open_store(num_ranks + 1)  # this process keeps it, and is no rank
    command = [sys.executable, "-c", f"from {all_reduce_trial.__name__} import run_rank; run_rank()"]
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
        ended = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for said, errors in ended:  # whatever the exit codes: NCCL may abort while it is torn down
        if not said:
            raise RuntimeError(f"a rank failed: {(errors.strip().splitlines() or ['without a word'])[-1]}")
    return outcome(num_ranks, [json.loads(said.splitlines()[-1]) for said, _ in ended])


def outcome(num_ranks: int, reports: list[dict[str, Any]]) -> CheckOutcome:
    """Return the table's line of the ranks' reports."""
    why_not = "; ".join(sorted({report["reason"] for report in reports if report["reason"]}))
    if all(report["works"] for report in reports):
        way = "NVLink multicast" if reports[0]["multicast"] else "peer memory"
        apart = "" if all(report["fuses"] for report in reports) else f", not fused with norms ({why_not})"
        return CheckOutcome(f"{num_ranks} GPUs by {way}{apart}")
    return CheckOutcome(f"{num_ranks} GPUs by NCCL alone ({why_not}): about 1 ms more per step")
