"""Sums through symmetric memory over real processes and gloo, with stand-ins for the operators of CUDA.

The stand-ins check arguments as PyTorch's own do (`CUDASymmetricMemoryOps.cu` of 2.5 to 2.13): equal sizes,
contiguity, memory after a rendezvous, dtypes, multicast. They sum in the order of the ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from manta.jobs.doctor.all_reduce_check import outcome, try_all_reduce
from support.oracles.sampling_cases import WHOLE

WORKER = """
import json, logging, os, sys, time
os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as memory
from manta.actors.workers.comm import process_group as pg
from manta.actors.workers.comm.custom_all_reduce import MAX_BYTES, CustomAllReduce
from manta.actors.workers.comm.all_reduce_trial import report_of_rank
from manta.drafter.compute.gpu_triton.linear.all_reduce_norm import sum_add_rms_norm
from manta.drafter.compute.gpu_triton.common.element_ops import add_rms_norm

rank, ranks, port, cases, folder = (json.loads(argument) for argument in sys.argv[1:])
store = port
if rank == 0:
    store = pg.open_store(ranks)
    print(store.port, flush=True)
pg.connect(rank=rank, world_size=ranks, device=torch.device("cpu"), store=store, timeout_s=600)
group, fault = dist.group.WORLD, "none"
handler = logging.Handler()
handler.emit = lambda record: messages.append(f"{record.levelname}: {record.getMessage()}")
logging.getLogger("manta.actors.workers.comm.custom_all_reduce").addHandler(handler)
joined = {}  # pointers of memory after a rendezvous
made = []  # this rank's memory: all ranks map its files

class Handle:
    def __init__(self, number):
        self.number = number

    @property
    def multicast_ptr(self):
        return 0 if fault == "no multicast" or (fault == "multicast on one rank" and rank) else 1

    def get_buffer(self, peer, sizes, dtype, storage_offset=0):
        if fault == "no buffers" and rank == 0:
            raise RuntimeError("no peer buffers")
        assert storage_offset == 0 and len(sizes) == 1
        return mapped(self.number, peer, sizes[0], dtype)

def mapped(number, owner, size, dtype):
    path, num_bytes = f"{folder}/{number}-{owner}", size * dtype.itemsize
    end = time.monotonic() + 250
    while owner != rank and not (os.path.exists(path) and os.path.getsize(path) >= num_bytes):
        check("no memory of this rank", time.monotonic() < end)
        time.sleep(0.01)
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
    return torch.tensor([], dtype=dtype).set_(storage)

def empty(size, *, dtype, device):
    if fault == "no memory" and rank == 1:
        made.append(None)  # later numbers are those of the other ranks
        raise RuntimeError("peer access is not supported")
    made.append(mapped(len(made), rank, size, dtype))
    made[-1].view(torch.uint8).fill_(255)  # NaN
    return made[-1]

def rendezvous(tensor, name):
    if fault == "no rendezvous" and rank == ranks - 1:
        raise RuntimeError("cannot import a handle")
    assert name == group.group_name
    joined[tensor.untyped_storage().data_ptr()] = name
    (number,) = (i for i, each in enumerate(made) if each is tensor)
    return Handle(number)

def check(what, condition):
    if not condition:
        raise RuntimeError(what)

def summed(tensor):
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(parts, tensor)
    order = range(ranks) if fault != "order" else [(rank + i) % ranks for i in range(ranks)]
    total = parts[order[0]].clone()
    for other in order[1:]:
        total += parts[other]
    return total + (fault == "wrong" and rank == 0)

class Ops:
    def one_shot_all_reduce_copy_out(self, buffer, local, op, name, out):
        used.append("one shot")
        are_contiguous = buffer.is_contiguous() and local.is_contiguous() and out.is_contiguous()
        check("input must be contiguous", are_contiguous)
        check("input/output size mismatch", out.shape == buffer.shape)
        check("only sum", op == "sum")
        check("local input size must match", local.numel() == buffer.numel() and local.dtype == buffer.dtype)
        check("not symmetric memory", joined.get(buffer.untyped_storage().data_ptr()) == name)
        check("alignment", local.numel() * local.element_size() % 4 == 0)
        check("dtype", local.dtype in (torch.float32, torch.bfloat16))
        return out.copy_(summed(local))

    def multimem_all_reduce_(self, tensor, op, name):
        used.append("multicast")
        check("input must be contiguous", tensor.is_contiguous())
        check("only sum", op == "sum")
        check("not symmetric memory", joined.get(tensor.untyped_storage().data_ptr()) == name)
        check("multicast support is required", Handle(0).multicast_ptr)
        check("alignment", tensor.numel() * tensor.element_size() % 4 == 0)
        check("dtype", tensor.dtype in (torch.float32, torch.bfloat16))
        return tensor.copy_(summed(tensor))

def fused(*found):
    total, normed = sum_add_rms_norm(*found)
    return total + (fault == "wrong kernel"), normed

def sums_with_norm(buffers):
    # Numbers of rows in turn; a rank that is late is waited for.
    exact = []
    for i, num_rows in enumerate((3, 1, 5, 2, 3)):
        generator = torch.Generator().manual_seed(i)
        # Whole numbers: the interpreter rounds to bf16 otherwise than PyTorch.
        values = torch.randint(-8, 8, (ranks + 1, num_rows, 40), generator=generator).to(buffers.dtype)
        *parts, x = values
        weight = torch.rand(40, generator=generator) + 0.5
        if i == rank:
            time.sleep(0.2)
        total = sum(part.float() for part in parts).to(buffers.dtype)
        expected = add_rms_norm(total, x, weight, 1e-6, 0.5 if i == 2 else None)
        own = parts[rank]
        assert buffers.takes(own) and not buffers.takes(own.expand(129, *own.shape).flatten(0, 1))
        got = sum_add_rms_norm(own, buffers, x, weight, 1e-6, 0.5 if i == 2 else None)
        exact.append(all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))
    return exact

def rows_have_own_memory(buffers):
    # Whatever their width, as a rank waits only for those that read the row that it writes.
    max_rows, found = len(buffers.launches), []
    own = made[-1].view(buffers.dtype)[: max_rows * 2 * buffers.row_values]
    places = own.view(max_rows, 2, buffers.row_values)
    dist.barrier()
    for width, row_at in ((40, 1), (8, 4), (64, 2)):
        places.fill_(0)
        parts = torch.zeros(row_at + 1, width, dtype=buffers.dtype)
        parts[row_at] = 1
        sum_add_rms_norm(parts, buffers, parts, parts[0] + 1, 1e-6)
        dist.barrier()
        found.append(places.abs().sum((1, 2), dtype=torch.float32).nonzero().flatten().tolist() == [row_at])
    return found

def run(dtype):
    kernel = None if (fault, dtype) in (("no multicast", torch.bfloat16),) else fused
    peers = CustomAllReduce._tried(group, torch.device("cpu"), dtype, kernel)
    out = {"works": peers is not None, "sums": []}
    if peers:
        for shape in ((3, 2), (16, 4096), (1, MAX_BYTES // dtype.itemsize)):
            generator = torch.Generator().manual_seed(7)
            parts = torch.randint(-8, 8, (ranks, *shape), generator=generator).to(dtype)
            own = parts[rank].clone()
            assert peers.takes(own)
            peers.add_up(own)
            out["sums"].append(torch.equal(own, parts.sum(0)))
        others = {"too large": (MAX_BYTES // dtype.itemsize + 2, dtype), "other dtype": (8, torch.float64)}
        if dtype is torch.bfloat16:
            others["odd"] = (3, dtype)
        out["fused"] = None if peers.buffers is None else sums_with_norm(peers.buffers)
        out["rows"] = None if peers.buffers is None else rows_have_own_memory(peers.buffers)
        out["taken"] = [name for name, (n, dt) in others.items() if peers.takes(torch.empty(n, dtype=dt))]
    return out

memory.empty, memory.rendezvous, torch.ops.symm_mem = empty, rendezvous, Ops()
CustomAllReduce.of = CustomAllReduce._tried
results = []
for fault, dtype in cases:
    messages, used = [], []
    found = {**run(getattr(torch, dtype)), "used": sorted(set(used)), "messages": list(messages)}
    results.append(found | {"report": report_of_rank(torch.device("cpu"), fused)})
print(json.dumps(results), flush=True)
dist.barrier()  # gloo may abort while it is torn down, most of all if a peer is gone
os._exit(0)
"""


WORKING = {
    ("none", "bfloat16"): "multicast",
    ("no multicast", "bfloat16"): "one shot",
    ("no multicast", "float32"): "one shot",
    ("multicast on one rank", "bfloat16"): "one shot",
    ("no buffers", "bfloat16"): "multicast",
    ("wrong kernel", "float32"): "multicast",
}
# Why sums are not fused with norms, where single sums work.
UNFUSED = {
    ("no buffers", "bfloat16"): "no peer buffers",
    ("wrong kernel", "float32"): "a fused sum was wrong",
}
NOT_TRIED = ("no multicast", "bfloat16")
FAILING = {
    ("no memory", "bfloat16"): "peer access is not supported",
    ("no rendezvous", "bfloat16"): "cannot import a handle",
    ("wrong", "bfloat16"): "a sum was wrong",
    ("order", "bfloat16"): "ranks got different sums",  # two values have one sum
    ("order", "float32"): "ranks got different sums",
    ("none", "float16"): "dtype",
}
Result = dict[str, Any]  # Any: JSON


@pytest.fixture(scope="module", params=[2, 4] if WHOLE else [3])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[Result]]:
    """Each rank's results by case."""
    folder = str(tmp_path_factory.mktemp("memory"))
    cases = [case for case in (*WORKING, *FAILING) if request.param > 2 or case[0] != "order"]

    def start(rank: int, port: int) -> subprocess.Popen[str]:
        arguments = [json.dumps(each) for each in (rank, request.param, port, cases, folder)]
        command = [sys.executable, "-c", WORKER, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = start(0, 0)
    assert first.stdout is not None
    port = int(first.stdout.readline())
    workers = [first] + [start(rank, port) for rank in range(1, request.param)]
    ended = [worker.communicate(timeout=600) for worker in workers]
    assert not any(worker.returncode for worker in workers), [error[-800:] for _, error in ended]
    found = [json.loads(output.splitlines()[-1]) for output, _ in ended]
    return {case: [each[i] for each in found] for i, case in enumerate(cases)}


def test_small_sums_use_the_operator_that_the_devices_support(
    results: dict[tuple[str, str], list[Result]],
) -> None:
    for case, operator in WORKING.items():
        for result in results[case]:
            assert result["works"] and result["used"] == [operator]
            assert bool(result["messages"]) == (case in UNFUSED)
            assert result["sums"] == [True] * 3 and not result["taken"]


def test_sums_and_norms_of_few_rows_are_one_kernel(results: dict[tuple[str, str], list[Result]]) -> None:
    """Its bits are those of a sum in rank order and `add_rms_norm`; processes wait for each other's flags."""
    for case in WORKING:
        for result in results[case]:
            is_fused = case not in (*UNFUSED, NOT_TRIED)
            assert result["fused"] == ([True] * 5 if is_fused else None)
            assert result["rows"] == ([True] * 3 if is_fused else None)
            if case in UNFUSED:
                (message,) = result["messages"]
                assert message.startswith("WARNING") and "not fused" in message
        if case in UNFUSED:
            assert any(UNFUSED[case] in result["messages"][0] for result in results[case])


def test_if_one_rank_cannot_all_use_nccl_and_say_why(results: dict[tuple[str, str], list[Result]]) -> None:
    for case, reason in FAILING.items():
        for result in results.get(case, []):
            assert not result["works"]
            assert len(result["messages"]) == 1 and result["messages"][0].startswith("WARNING")
        assert case not in results or any(reason in result["messages"][0] for result in results[case])


def test_the_doctor_says_by_which_way_or_why_not(results: dict[tuple[str, str], list[Result]]) -> None:
    """Its ranks try bf16 whatever the case's dtype."""
    for case, operator in WORKING.items():
        way = {"multicast": "NVLink multicast", "one shot": "peer memory"}[operator]
        reports = [result["report"] for result in results[case]]
        measured, expected = outcome(len(reports), reports).measured, f"{len(reports)} GPUs by {way}"
        if case in UNFUSED:
            assert measured.startswith(f"{expected}, not fused with norms (") and UNFUSED[case] in measured
        else:
            assert measured == expected
    for (fault, dtype), reason in FAILING.items():
        if dtype == "bfloat16" and (fault, dtype) in results:
            reports = [result["report"] for result in results[fault, dtype]]
            found = outcome(len(reports), reports)
            assert "by NCCL alone" in found.measured and reason in found.measured
            assert found.passed is None, "it runs without"


@pytest.mark.parametrize("num_ranks", [2, 4] if WHOLE else [2])
def test_the_doctor_starts_a_rank_for_each_device(num_ranks: int) -> None:
    assert try_all_reduce(num_ranks, "cpu").measured.startswith(f"{num_ranks} GPUs by NCCL alone")


@pytest.mark.if_changed
def test_the_doctor_tells_why_a_rank_fails() -> None:
    with pytest.raises(RuntimeError, match=r"a rank failed: .*device"):
        try_all_reduce(2, "no such device")
