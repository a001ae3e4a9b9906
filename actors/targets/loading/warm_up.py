"""Made-up steps: to pay for first calls before the first request does, and to measure memory.

They leave traces in the first slots and pages; whoever gets those overwrites them. Called by `rank.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from ....cluster.config import EngineConfig
from ....cluster.made_up_plans import made_up_plan
from ....cluster.plan import SchedulerOutput
from ..runners.runner import Runner
from .memory import used_gpu_bytes

_PROMPT_TOKENS = 8


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
        runner.execute(made_up_plan([prompt], [drafts + 1], [drafts]))


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
    none = [0] * len(lengths)
    prompts = [np.zeros(n, np.int32) for n in lengths]
    return made_up_plan(
        none, lengths, none, prompts=prompts, num_pages=[-(-room // page_size) for room in rooms]
    )
