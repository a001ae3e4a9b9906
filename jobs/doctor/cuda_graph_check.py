"""Compares decoding steps replayed from CUDA graphs with the same steps launched kernel by kernel.

Runs the pair's own steps in fp32 with all drafts, half of them, and none, and compares tokens and K/V, also
the drafter's, since wrong drafts change no token. Imports the GPU runner; `doctor_run.py` imports this file
only on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...actors.targets.loading.rank_loader import load_runner
from ...actors.targets.loading.resolved_config import ResolvedConfig
from ...actors.targets.runners.drafts.device_blocks import DeviceBlocks
from ...actors.targets.runners.gpu_runner import GpuModelRunner
from ...cluster.pages.kv_cache_groups import pages_for
from ...cluster.step.dummy_steps import dummy_step
from ...cluster.step.scheduler_output import SchedulerOutput, StepResult, Trim
from .cases.checks import REMEDY, Check, CheckOutcome, off_by
from .pair_check import MAX_LENGTH, settings_of

_Result = tuple[list[StepResult], list[Tensor]]  # results of the steps, and the models' pages after them
_PROMPTS = (40, 5, 19)  # tokens; three requests, fewer than a graph may have room for
_STEPS = 2
_BOUND = 100  # ulp of K and V in fp32: a padded batch may use other tiles


def capture_checks(resolved: ResolvedConfig) -> Iterator[Check]:
    for drafts in sorted({0, resolved.num_speculative_tokens}):
        for cut in (False, True) if drafts else (False,):
            look = partial(_captured, resolved, drafts, cut=cut)
            line = f"a captured step = a launched one, {drafts} drafts{', cut' if cut else ''}"
            yield Check("steps", line, look, REMEDY)


def _captured(resolved: ResolvedConfig, drafts: int, *, cut: bool) -> CheckOutcome:
    """Run a prefill and some decoding steps, replayed and launched, over the same pages, and compare."""
    runner, info = load_runner(settings_of(resolved, dtype="float32", attention_backend="triton"))
    assert isinstance(runner, GpuModelRunner), "Triton's kernels step on the device"
    launched = _without_graphs(runner, resolved)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, resolved.target.vocab_size, n, dtype=np.int32) for n in _PROMPTS]
    admission = dummy_step(
        [0] * len(prompts),
        _PROMPTS,
        [0] * len(prompts),
        prompts=prompts,
        num_pages=[pages_for(min(MAX_LENGTH, info.max_model_len), info.page_size)] * len(prompts),
        groups=info.page_groups,
    )
    step = dummy_step([-1] * len(prompts), [drafts + 1] * len(prompts), [drafts] * len(prompts))
    if cut:
        step = replace(step, trim=_trim_half(drafts))
    with _replays() as count:
        replayed = _run(runner, admission, step)
    if not count:
        return CheckOutcome("no graph was replayed", "replays", passed=False)
    return _compare(replayed, _run(launched, admission, step))


def _trim_half(drafts: int) -> Trim:
    """Return a trim to half of the rows by draft position alone, since margins differ in the last place."""
    even_K, ones_R = np.zeros(drafts, np.float32), np.ones(len(_PROMPTS), np.float32)
    num_rows = len(_PROMPTS) * (2 + drafts) // 2
    return Trim(even_K, even_K, 0 * ones_R, ones_R, np.empty(0, np.float32), num_rows)


def _without_graphs(runner: GpuModelRunner, resolved: ResolvedConfig) -> GpuModelRunner:
    max_rows = resolved.max_num_batched_tokens
    num_drafts = resolved.num_speculative_tokens
    return GpuModelRunner(runner.models, len(_PROMPTS), num_drafts, max_rows, captures=False)


def _compare(replayed: _Result, launched: _Result) -> CheckOutcome:
    (results, kv), (expected, expected_kv) = replayed, launched
    differing = sum(
        int((a.token_ids != b.token_ids).sum() + (a.num_tokens != b.num_tokens).sum())
        for a, b in zip(results, expected, strict=True)
    )
    units = max(off_by(a, b.double()) for a, b in zip(kv, expected_kv, strict=True))
    measured = f"{differing} tokens differ, K/V by {units:.3g} ulp"
    return CheckOutcome(measured, f"0, {_BOUND} ulp", not differing and units <= _BOUND)


def _run(runner: GpuModelRunner, admission: SchedulerOutput, step: SchedulerOutput) -> _Result:
    """Return the results of the steps, and the models' K/V pages without the last one, which is scratch."""
    caches, drafts = [runner.models.cache.kv], runner.models.drafts
    if isinstance(drafts, DeviceBlocks):
        caches.append(drafts.context.kv)
    with torch.inference_mode():
        for kv in caches:
            kv.zero_()
    runner.execute(admission)
    results = [runner.execute(step) for _ in range(_STEPS)]
    return results, [kv[:, :-1].clone() for kv in caches]


@contextmanager
def _replays() -> Iterator[list[None]]:
    """Count graph replays in the `with` block: without any, equal results would prove nothing."""
    count: list[None] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        count.append(None)
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
