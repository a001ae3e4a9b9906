"""Rehearses a start on a pretended GPU: rehearse.py DEVICE_GUARD SETTINGS; prints a JSON report.

SETTINGS, as JSON: `engine` and `speculation` (fields of EngineConfig and SpeculativeConfig), `model` (of
`bench`'s random models), `rank` of `ranks`, whether to `swap` the drafter at the end, to `plant` faults in
captures, and to choose the `library`'s products, and a wait to leave out (`hurry`). The rank serves some
requests; with a `tier` below the pages twice, of host memory for some pages and files for all.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from manta.jobs.compile.pretended_gpu import fake_tensors, pretend
from support.rehearsal.recording import Recording
from torch._subclasses.fake_tensor import FakeTensor

recording = Recording()
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
pretend(recording)

# Only now: these look for a GPU when they are imported.
from manta.actors.engine.uniproc_executor import InProcessExecutor  # noqa: E402
from manta.actors.targets.loading import rank_loader  # noqa: E402
from manta.actors.targets.loading.resolved_config import ResolvedConfig, resolve_models  # noqa: E402
from manta.actors.targets.model.tensor_parallel import SingleRank  # noqa: E402
from manta.actors.targets.runners import cuda_graphs  # noqa: E402
from manta.actors.targets.runners.drafts.device_blocks import DeviceBlocks  # noqa: E402
from manta.actors.targets.runners.gpu_runner import GpuModelRunner  # noqa: E402
from manta.actors.targets.runners.page_mover import PageMover, _Copies  # noqa: E402
from manta.actors.targets.runners.runner_interface import Runner  # noqa: E402
from manta.actors.workers.drafter import remote_drafter  # noqa: E402
from manta.actors.workers.drafter.remote_drafter import RemoteDrafterSource  # noqa: E402
from manta.cluster.config import EngineConfig, SpeculativeConfig  # noqa: E402
from manta.cluster.engine.engine_core import EngineCore  # noqa: E402
from manta.cluster.kv_cache import kv_tier  # noqa: E402
from manta.cluster.request.request import Request, SamplingParams  # noqa: E402
from manta.cluster.step.executor import ExecutorInfo  # noqa: E402
from manta.cluster.step.page_transfer import PagesMoved, PageTransfer  # noqa: E402
from manta.cluster.step.scheduler_output import SchedulerOutput  # noqa: E402
from manta.drafter.compute.backend import Backend  # noqa: E402
from manta.drafter.compute.gpu_triton.common.element_ops import rms_norm  # noqa: E402
from manta.drafter.compute.gpu_triton.linear.gemm_choice import MeasuredChoice  # noqa: E402
from manta.drafter.dflash.config import DrafterConfig  # noqa: E402
from manta.drafter.dflash.model import ContextFeatures  # noqa: E402
from manta.drafter.step.gpu_triton.inputs.transfers import PendingResult, StepOutput, Upload  # noqa: E402
from manta.jobs.bench.common.random_weights import QWEN3_8B, PairShape, RandomModels  # noqa: E402
from manta.jobs.compile.pretended_start import PretendedRank, pretend_values  # noqa: E402

MAX_LENGTH = 8192
HOST_BYTES = 2**24  # some ten pages, fewer than a prompt has
submitted: dict[int, Counter[int]] = {}  # what streams had got when a transfer was begun, by its number


class RecordingRank(PretendedRank):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.seen: list[tuple[str, list[int], str, bool]] = []

    def note(self, kind: str, tensor: torch.Tensor) -> None:
        is_captured = recording.capture is not None
        self.seen.append((kind, list(tensor.shape), str(tensor.dtype), is_captured))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note("all_reduce", tensor)
        return super().all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.note("all_gather", tensor)
        return super().all_gather(tensor, dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.note("broadcast", tensor)
        return super().broadcast(tensor, source)


def one_token_each(
    values: torch.Tensor, *shape: int, views_of: Callable[..., StepOutput] = StepOutput.views_of
) -> StepOutput:
    """`StepOutput.views_of`, with a new token for each request, and no time, where the host reads."""
    outcome = views_of(values, *shape)
    if not isinstance(values, FakeTensor):
        rows_RW1 = outcome.rows_RW1.numpy()
        rows_RW1[:, 1:-1], rows_RW1[:, 0], rows_RW1[:, -1] = -1, 1, 1
        outcome.times.numpy()[:] = 0
    return outcome


def faults() -> list[Callable[[], object]]:
    """Return what no capture may contain; each is harmless outside of one."""

    def value() -> torch.Tensor:
        return torch.zeros(4, device="cuda")

    def new_kernel() -> object:
        weight = torch.ones(257, dtype=torch.float16, device="cuda")
        if recording.capture is not None:
            rms_norm(torch.zeros((4, 257), dtype=torch.float16, device="cuda"), weight, 1e-6)
        return weight

    return [
        lambda: value().sum().item(),
        lambda: value().cpu(),
        lambda: torch.tensor([1, 2]).to("cuda"),
        lambda: value()[torch.tensor([0, 1, 1, 0])],
        lambda: value()[torch.tensor([True, False, True, False], device="cuda")],
        lambda: torch.cuda.Event().record(),
        lambda: torch.cuda.Event().synchronize(),
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        new_kernel,
    ]


def plant(planted: list[Callable[[], object]]) -> None:
    """Make each capture contain one of the faults, in turn."""
    turns, capture = cycle(planted), cuda_graphs._capture

    def with_fault(run: Callable[[], Any], pool: Any) -> Any:
        fault = next(turns)

        def both() -> Any:
            result = run()
            try:
                fault()
            except Exception:  # of a shape that only values decide
                recording.on_host_call("a fault raised")
            return result

        return capture(both, pool)

    cuda_graphs._capture = with_fault


def serve(config: EngineConfig, resolved: ResolvedConfig, runner: Runner, info: ExecutorInfo) -> int:
    """Run requests of all kinds to their ends, with a step in flight while the next one is planned.

    With a tier below the pages, run them again with an empty prefix cache. Return the tokens that were read.
    """

    class Executor(InProcessExecutor):
        def _load(self, config: EngineConfig) -> tuple[ResolvedConfig, Runner, ExecutorInfo]:
            return resolved, runner, info

        def submit(self, plan: SchedulerOutput) -> None:
            super().submit(plan)
            if runner.mover is not None:
                move(runner.mover)

    assert info.max_in_flight > 1
    engine = EngineCore(config, Executor(config))
    for _ in range(1 if info.kv_tier is None else 2):
        for number in range(2 * config.max_num_seqs):
            prompt = tuple(range(1, 2 + 700 * (2 * number % 3)))
            sampling = SamplingParams(
                temperature=number % 2, top_k=20 * (number % 4), seed=number, max_tokens=12
            )
            engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, params=sampling))
            if number == 0:  # pages move beside its steps
                engine.step()
        while engine.has_unfinished:
            engine.step()
        engine.save_pages()
        engine.reset_prefix_cache()
    return engine.stats().tier_hits


def move(mover: PageMover) -> None:
    """Move pages beside a step that was just submitted, while the one before it may be in flight."""
    while queue := mover._loads or mover._saves:
        recording.beside = submitted.pop(queue[0][0].number)
        mover._move_next()
        recording.beside = None


def move_in_turn() -> None:
    """Move pages in this thread: tensors of another one would not be fake."""
    begin, take_ended = PageMover.begin, PageMover.take_ended

    def begin_in_turn(self: PageMover, transfer: PageTransfer) -> None:
        num_waits, submitted[transfer.number] = recording.num_waits, Counter(recording.begun)
        begin(self, transfer)
        if recording.num_waits > num_waits:
            recording.violations["steps wait for pages that move"] += 1

    def move_and_take(self: PageMover, wait_s: float) -> list[PagesMoved]:
        move(self)
        return take_ended(self, wait_s)

    PageMover.begin, PageMover.take_ended = begin_in_turn, move_and_take
    PageMover._run = lambda self: None
    kv_tier._UNKNOWN_WAIT_S = math.inf  # steps are slow here


def hurry(wait: str) -> None:
    """Leave out a wait, which the rehearsal must notice."""
    if wait == "outcome":
        PendingResult.wait = lambda self: self.values
    elif wait == "upload":
        Upload._next_slot = lambda self: self._slots[0]
    elif wait == "steps":
        _Copies.steps_so_far = lambda self: None
    elif wait == "pages":
        _Copies.wait = lambda self: None
    else:
        torch.cuda.synchronize = lambda device=None: None


def in_process(config: EngineConfig) -> EngineConfig:
    """Return settings with which an engine runs a rank that is loaded, whatever its other processes."""
    spec = config.speculative_config
    colocated = None if spec is None else replace(spec, placement="colocated")
    return replace(config, tensor_parallel_size=1, speculative_config=colocated)


def features(resolved: ResolvedConfig, backend: Backend) -> ContextFeatures:
    """Return a split drafter's part on the target's side, with random weights."""
    drafter = resolved.drafter
    assert isinstance(drafter, DrafterConfig), "other drafters are colocated"
    hidden_size, taps = drafter.hidden_size, len(drafter.target_layer_ids)
    weight = torch.empty((hidden_size, taps * hidden_size), dtype=resolved.dtype, device="cuda")
    norm = torch.empty(hidden_size, dtype=resolved.dtype, device="cuda")
    return ContextFeatures(weight, norm, drafter.rms_norm_eps, backend)


def main(settings: dict[str, Any], tier: str) -> None:
    pretend_values()
    StepOutput.views_of = one_token_each  # pyright: ignore[reportAttributeAccessIssue]
    remote_drafter._context_features = features
    move_in_turn()
    if settings.get("library"):
        launch_both = MeasuredChoice._agree
        MeasuredChoice._agree = lambda self, use, own, other, dtype: [
            not choice for choice in launch_both(self, use, own, other, dtype)
        ]
    if settings.get("plant"):
        plant(faults())
    if wait := settings.get("hurry"):
        hurry(wait)
    num_ranks, speculation = settings.get("ranks", 1), settings.get("speculation", {})
    ranks = RecordingRank(settings.get("rank", 0), num_ranks)
    shape = PairShape.of("Qwen3-8B", {**QWEN3_8B, "num_hidden_layers": 1, **settings.get("model", {})})
    config = EngineConfig(
        model="random",
        skip_tokenizer_init=True,
        tensor_parallel_size=num_ranks,
        speculative_config=None if speculation is None else SpeculativeConfig(model="random", **speculation),
        **{"max_num_seqs": 4, **settings.get("engine", {})},
        **({"kv_tier_path": tier, "kv_tier_host_bytes": HOST_BYTES} if settings.get("tier") else {}),
    )
    with fake_tensors(recording):
        drafter = None if speculation is None else shape.drafter
        plan = resolve_models(config, Path("random"), shape.target, Path("random"), drafter, MAX_LENGTH)
        communicator = ranks if num_ranks > 1 else SingleRank()
        remote = partial(RemoteDrafterSource, communicator=communicator) if plan.split else None
        runner, info = rank_loader.start_runner(plan, RandomModels(), communicator, remote_drafts=remote)
        of_start = {name: frozenset(keys) for name, keys in recording.variants.items()}
        num_read = serve(in_process(config), plan, runner, info)
        if settings.get("swap"):
            assert isinstance(runner, GpuModelRunner) and isinstance(runner.models.drafts, DeviceBlocks)
            runner.swap_drafter(runner.models.drafts.drafter)
    report = {
        "used_bytes": recording.memory.most_bytes,
        "allowed_bytes": int(config.gpu_memory_utilization * torch.cuda.mem_get_info()[1]),
        "violations": recording.violations,
        "host_reads": recording.host_reads,
        "new_in_capture": recording.new_in_capture,
        "graphs": recording.graphs,
        "new_after_start": {
            name: sorted(map(str, new))
            for name, keys in recording.variants.items()
            if (new := keys - of_start.get(name, frozenset()))
        },
        "variants": {name: sorted(map(str, keys)) for name, keys in recording.variants.items()},
        "collectives": ranks.seen,
        "tier_hits": num_read,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(json.loads(sys.argv[2]), folder)
