"""Collectives between real processes over gloo."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from manta.actors.workers.comm import process_group

WORKER = """
import json, os, signal, sys
import torch
from manta.actors.workers.comm import process_group as pg

rank, ranks, port, fault = (int(a) for a in sys.argv[1:])
store = port
if rank == 0:
    store = pg.open_store(ranks)
    print(store.port, flush=True)
group = pg.connect(rank=rank, world_size=ranks, device=torch.device("cpu"), store=store, timeout_s=600)
if fault and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
own = torch.arange(6.0).reshape(2, 3) + 10 * rank
group.use_peer_memory(torch.float32)  # between GPUs alone: nothing changes here
out = {"group": [group.rank, group.world_size]}
out["sum"] = group.all_reduce(own.clone()).tolist()
out["rows"] = group.all_gather(own, dim=0).tolist()
out["columns"] = group.all_gather(own).tolist()
out["drafts"] = group.broadcast(torch.full((2, 2), rank, dtype=torch.int32), source=1).tolist()
print(json.dumps(out))
group.close()
"""


def run_workers(ranks: int, fault: bool = False) -> list[subprocess.Popen[str]]:
    def start(rank: int, port: int) -> subprocess.Popen[str]:
        arguments = [rank, ranks, port, int(fault)]
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start(0, 0)
    assert first.stdout is not None
    port = int(first.stdout.readline())
    return [first] + [start(rank, port) for rank in range(1, ranks)]


def test_collectives_work_between_the_targets_ranks() -> None:
    workers = run_workers(2)
    results = [json.loads(worker.communicate(timeout=600)[0].splitlines()[-1]) for worker in workers]
    own = [torch.arange(6.0).reshape(2, 3) + 10 * rank for rank in range(2)]
    for rank, result in enumerate(results):
        assert result["group"] == [rank, 2]
        assert result["sum"] == sum(own).tolist()
        assert result["rows"] == torch.cat(own, 0).tolist()
        assert result["columns"] == torch.cat(own, 1).tolist()
        assert result["drafts"] == [[1] * 2] * 2


def test_a_rank_that_dies_fails_its_peers_instead_of_stalling_them() -> None:
    first, second = run_workers(2, fault=True)
    second.wait(600)
    _, trace = first.communicate(timeout=600)
    assert first.returncode != 0
    assert "Error" in trace and "Timed out" not in trace, "it does not wait for the collective's own limit"


def test_the_store_listens_on_the_given_address_only() -> None:
    store = process_group.open_store(2)
    listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    hexadecimal = f"{store.port:04X}"
    addresses = [
        line.split()[1] for line in listening.splitlines() if f":{hexadecimal} 00000000:0000 0A" in line
    ]
    assert addresses == [f"0100007F:{hexadecimal}"]
