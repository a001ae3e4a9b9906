"""Made-up steps: to pay for first calls before the first request does, and to measure memory.

They leave traces in the first slots and pages; whoever gets those overwrites them. Called by `rank.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from ....cluster.config import EngineConfig
from ....cluster.plan import AdmittedRequest, SchedulerOutput, SlotSampling
from ..runners.runner import Runner
from .memory import used_gpu_bytes

_PROMPT_TOKENS = 8
_GREEDY = SlotSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_length=0, stop_token_ids=()
)


def warm_up(runner: Runner, num_drafts: int, max_tokens: int, page_size: int) -> None:
    """A small prefill, a step with drafts and one without.

    Args:
        max_tokens: what pages and sequences have room for.
    """
    prompt = min(_PROMPT_TOKENS, max_tokens - 2)
    if prompt < 1:
        return
    runner.execute(_prefill([prompt], [max_tokens], page_size))
    for drafts in sorted({0, max(0, min(num_drafts, max_tokens - prompt - 2))}):
        runner.execute(_step((), [prompt], [drafts + 1], [drafts]))


def largest_prefill(config: EngineConfig, max_model_len: int) -> list[int]:
    """Prompt lengths that fill a step."""
    length = min(max_model_len, config.max_num_batched_tokens)
    return [length] * min(config.max_num_batched_tokens // length, config.max_num_seqs)


def measure_step_bytes(
    make_runner: Callable[[], Runner], lengths: list[int], page_size: int, device: torch.device
) -> int:
    """GPU memory that steps take: states and workspaces, the largest prefill, all captured graphs.

    By making all of it once, in a few pages that are counted too and given back with it. What a process takes
    outside PyTorch's allocator (kernels, NCCL's and graphs' own) counts as well.
    """
    torch.cuda.empty_cache()  # else the runner would live in what loading has left
    before = used_gpu_bytes(device)
    runner = make_runner()
    runner.execute(_prefill(lengths, lengths, page_size))
    runner.prepare()
    taken = used_gpu_bytes(device) - before
    del runner
    gc.collect()
    return taken


def _prefill(lengths: list[int], rooms: list[int], page_size: int) -> SchedulerOutput:
    """Admit prompts into the first slots, with consecutive pages for `rooms` tokens, and compute them."""
    admitted = tuple(
        AdmittedRequest(slot, "warm-up", np.zeros(n, np.int32), _GREEDY) for slot, n in enumerate(lengths)
    )
    pages = [-(-room // page_size) for room in rooms]
    return _step(admitted, [0] * len(lengths), lengths, [0] * len(lengths), pages)


def _step(
    admitted: tuple[AdmittedRequest, ...],
    computed: list[int],
    rows: list[int],
    drafts: list[int],
    new_pages: list[int] | None = None,
) -> SchedulerOutput:
    slots = np.arange(len(rows), dtype=np.int32)
    counts = np.array(new_pages or [0] * len(rows), np.int32)
    owners = np.repeat(slots, counts)
    page_ids = np.arange(len(owners), dtype=np.int32)
    return SchedulerOutput(
        step=0,
        admitted=admitted,
        page_groups=np.zeros_like(owners),
        page_slots=owners,
        page_indices=page_ids - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32),
        page_ids=page_ids,
        slots=slots,
        num_computed=np.array(computed, np.int32),
        num_rows=np.array(rows, np.int32),
        num_drafts=np.array(drafts, np.int32),
        samples=np.ones(len(rows), bool),
    )
