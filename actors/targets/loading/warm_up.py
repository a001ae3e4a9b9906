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
from ....cluster.pages import pages_for
from ....cluster.plan import SchedulerOutput
from ..runners.runner import Runner
from .memory import used_gpu_bytes
from .plan import LoadPlan

_PROMPT_TOKENS = 8


def warm_up(runner: Runner, plan: LoadPlan, num_pages: tuple[int, ...]) -> None:
    """A small prefill, a step with drafts and one without."""
    pools = [group.pool for group in plan.pages.groups]
    room = min(count // pools.count(pool) for pool, count in enumerate(num_pages)) * plan.page_size
    most = min(room, plan.max_model_len, _PROMPT_TOKENS + plan.num_speculative_tokens + 2)
    prompt = min(_PROMPT_TOKENS, most - 2)
    if prompt < 1:
        return
    runner.execute(_prefill(plan, [prompt], [most]))
    for drafts in sorted({0, max(0, min(plan.num_speculative_tokens, most - prompt - 2))}):
        runner.execute(made_up_plan([prompt], [drafts + 1], [drafts]))


def largest_prefill(config: EngineConfig, max_model_len: int) -> list[int]:
    """Prompt lengths that fill a step."""
    length = min(max_model_len, config.max_num_batched_tokens)
    return [length] * min(config.max_num_batched_tokens // length, config.max_num_seqs)


def pages_of_prefill(plan: LoadPlan, lengths: list[int]) -> tuple[int, ...]:
    """Pages of each pool that such a step uses."""
    count = sum(pages_for(n, plan.page_size) for n in lengths)
    pools = [group.pool for group in plan.pages.groups]
    return tuple(count * pools.count(pool) for pool in range(plan.pages.num_pools))


def measure_step_bytes(make_runner: Callable[[], Runner], plan: LoadPlan, lengths: list[int]) -> int:
    """GPU memory that steps take: states and workspaces, the largest prefill, all captured graphs.

    By making all of it once, in a few pages that are counted too and given back with it. What a process takes
    outside PyTorch's allocator (kernels, NCCL's and graphs' own) counts as well.
    """
    torch.cuda.empty_cache()  # else the runner would live in what loading has left
    before = used_gpu_bytes(plan.device)
    runner = make_runner()
    runner.execute(_prefill(plan, lengths, lengths))
    runner.prepare()
    taken = used_gpu_bytes(plan.device) - before
    del runner
    gc.collect()
    return taken


def _prefill(plan: LoadPlan, lengths: list[int], rooms: list[int]) -> SchedulerOutput:
    """Admit prompts into the first slots, with consecutive pages for `rooms` tokens, and compute them."""
    none = [0] * len(lengths)
    return made_up_plan(
        none,
        lengths,
        none,
        prompts=[np.zeros(n, np.int32) for n in lengths],
        num_pages=[pages_for(room, plan.page_size) for room in rooms],
        groups=plan.pages.groups,
    )
