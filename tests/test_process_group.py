"""Collectives between real processes over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch
from manta.actors.workers import process_group

WORKER = """
import json, os, signal, sys
import torch
from manta.actors.workers import process_group as pg

rank, targets, split, port, fault = (int(a) for a in sys.argv[1:])
store = port
if rank == 0:
    store = pg.open_store(targets + split)
    print(store.port, flush=True)
groups = pg.connect(rank=rank, num_targets=targets, split_drafter=bool(split),
                    device=torch.device("cpu"), store=store, timeout_s=60)
if fault and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
own = torch.arange(6.0).reshape(2, 3) + 10 * rank
out = {"joint": [groups.joint.rank, groups.joint.world_size]}
out["groups"] = len({id(group) for group in (groups.joint, groups.target, groups.link) if group})
if groups.target:
    groups.target.use_peer_memory(torch.float32)  # between GPUs alone: nothing changes here
    out["target"] = [groups.target.rank, groups.target.world_size]
    out["sum"] = groups.target.all_reduce(own.clone()).tolist()
    out["rows"] = groups.target.all_gather(own, dim=0).tolist()
    out["columns"] = groups.target.all_gather(own).tolist()
if split:
    drafts = torch.full((2, 2), rank, dtype=torch.int32)
    out["drafts"] = groups.joint.broadcast(drafts, source=targets).tolist()
if groups.link:
    out["link"] = groups.link.broadcast(torch.full((1,), 100.0 + rank)).tolist()
print(json.dumps(out))
groups.close()
"""


def run_workers(targets: int, split: bool, fault: bool = False) -> list[subprocess.Popen[str]]:
    def start(rank: int, port: int) -> subprocess.Popen[str]:
        arguments = [rank, targets, int(split), port, int(fault)]
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start(0, 0)
    assert first.stdout is not None
    port = int(first.stdout.readline())
    return [first] + [start(rank, port) for rank in range(1, targets + split)]


@pytest.mark.parametrize(("targets", "split"), [(2, False), (1, True), (2, True)])
def test_collectives_of_target_joint_and_link_groups(targets: int, split: bool) -> None:
    workers = run_workers(targets, split)
    results = [json.loads(worker.communicate(timeout=60)[0].splitlines()[-1]) for worker in workers]
    own = [torch.arange(6.0).reshape(2, 3) + 10 * rank for rank in range(targets)]
    for rank, result in enumerate(results):
        assert result["joint"] == [rank, targets + split]
        # Groups of the same workers are one.
        assert rank > 0 or result["groups"] == (1 if not split else 2 if targets == 1 else 3)
        if rank < targets:
            assert result["target"] == [rank, targets]
            assert result["sum"] == sum(own).tolist()
            assert result["rows"] == torch.cat(own, 0).tolist()
            assert result["columns"] == torch.cat(own, 1).tolist()
        else:
            assert "target" not in result
        if split:
            assert result["drafts"] == [[targets] * 2] * 2
        assert ("link" in result) == (split and rank in (0, targets))
        assert result.get("link", [100.0]) == [100.0]


def test_a_rank_that_dies_fails_its_peers_instead_of_stalling_them() -> None:
    start = time.monotonic()
    first, second = run_workers(2, False, fault=True)
    second.wait(60)
    _, trace = first.communicate(timeout=60)
    assert first.returncode != 0
    assert "Error" in trace
    assert time.monotonic() - start < 50  # the collective's own limit is 60 s


def test_a_single_process_needs_no_group() -> None:
    groups = process_group.connect(
        rank=0, num_targets=1, split_drafter=False, device=torch.device("cpu"), store=0
    )
    tensor = torch.ones(2, 2)
    assert groups.target is not None
    assert groups.target.world_size == 1
    assert groups.target.all_reduce(tensor) is tensor
    assert groups.target.all_gather(tensor) is tensor
    groups.close()


def test_the_store_listens_on_the_given_address_only() -> None:
    store = process_group.open_store(2)
    listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    hexadecimal = f"{store.port:04X}"
    addresses = [
        line.split()[1] for line in listening.splitlines() if f":{hexadecimal} 00000000:0000 0A" in line
    ]
    assert addresses == [f"0100007F:{hexadecimal}"]
