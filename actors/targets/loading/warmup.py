"""Runs dummy steps: to pay for first calls before the first request, and to measure memory.

They write to the first slots and pages, which are overwritten once they are allocated.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ....cluster.errors import ConfigError
from ....cluster.pages.kv_cache_groups import pages_for
from ....cluster.request.request import LogitsProcessorParams
from ....cluster.request.structured_outputs import Grammar, SlotGrammar
from ....cluster.step.dummy_steps import GREEDY, dummy_step, dummy_trim
from ....cluster.step.scheduler_output import SchedulerOutput, SlotSampling, StateSaves
from ....drafter.compute.backend import Backend
from ....drafter.compute.batch_invariance import rows_are_invariant
from ..runners.runner_interface import Runner
from .memory_budget import used_gpu_bytes
from .resolved_config import ResolvedConfig

_PROMPT_TOKENS = 8
_FEWEST_ROWS = 16  # of prompts for which a GPU may choose other kernels
_ANY_WORDS = Grammar("regex", "[a-z ]*", is_cheap=True)


def warm_up(
    runner: Runner, resolved: ResolvedConfig, num_pages: tuple[int, ...], num_states: int | None
) -> None:
    """Run a small prefill, a step with drafts that may be cut, and one without, with each kind of sampling.

    Where drafts may branch, a step in which they do as well; on a GPU, prompts of all sizes.

    Otherwise a request would compile the loops and kernels that it is first to use, while all streams wait.
    """
    pools = [group.pool for group in resolved.pages.groups]
    capacity = min(count // pools.count(pool) for pool, count in enumerate(num_pages)) * resolved.page_size
    length = min(capacity, resolved.max_model_len, _PROMPT_TOKENS + resolved.num_speculative_tokens + 2)
    prompt = min(_PROMPT_TOKENS, length - 2)
    if prompt < 1:
        return
    pages = [pages_for(length, resolved.page_size)]
    for sampling in _sampling_variants(runner, prompt):
        runner.execute(_prefill(resolved, [prompt], num_pages=pages, sampling=sampling))
        for drafts in sorted({0, max(0, min(resolved.num_speculative_tokens, length - prompt - 2))}):
            step = dummy_step([prompt], [drafts + 1], [drafts])
            runner.execute(replace(step, trim=dummy_trim(step)) if drafts else step)
    if resolved.draft_shape.branches:
        drafts = max(0, min(resolved.max_drafts, length - prompt - 2))
        runner.execute(resolved.with_branches(dummy_step([prompt], [drafts + 1], [drafts])))
    if resolved.device.type == "cuda":
        _run_prompts(runner, resolved, capacity, num_states or 0)


def _run_prompts(runner: Runner, resolved: ResolvedConfig, capacity: int, num_states: int) -> None:
    """Run prompts of 16, 32, .. rows, for which a GPU has kernels of its own, with states saved and without.

    Kernels' tiles and forms (products, experts, latents, recurrent states) differ by rows, with bounds that
    are a factor of two or more apart. Steps of the most rows ran when memory was measured. These have at most
    half as many, so they take less memory.
    """
    most = min(resolved.max_num_batched_tokens // 2, capacity)
    rows, longest = _FEWEST_ROWS, min(resolved.max_model_len, most)
    while rows <= most:
        count = -(-rows // longest)
        lengths = [rows // count] * count
        pages = [pages_for(each, resolved.page_size) for each in lengths]
        rows *= 2
        if count > resolved.config.max_num_seqs or sum(pages) > capacity // resolved.page_size:
            break
        plan = _prefill(resolved, lengths, num_pages=pages)
        runner.execute(plan)
        if num_states > count:
            last = lengths[0] // resolved.page_size * resolved.page_size or lengths[0]
            runner.execute(replace(plan, saves=_one_save(last, num_states - 1)))
            runner.execute(replace(dummy_step([last - 1], [1], [0]), saves=_one_save(last, num_states - 1)))


def _one_save(position: int, state: int) -> StateSaves:
    """Return a save of the first request's state."""
    return StateSaves(*(np.array([value], np.int32) for value in (0, position, state)))


def _sampling_variants(runner: Runner, prompt: int) -> list[SlotSampling]:
    """Return settings that take different kernels (fp32 rules, noise, masks); the slot keeps the last."""
    grammar = None if runner.grammars is None else SlotGrammar(_ANY_WORDS, prompt)
    return [
        *(
            replace(GREEDY, temperature=temperature, rules=rules, grammar=grammar)
            for rules in (LogitsProcessorParams(prompt_length=prompt, presence=0.1), None)
            for temperature in (1.0, 0.0)
        ),
        GREEDY,
    ]


def measure_step_bytes(make_runner: Callable[[], Runner], resolved: ResolvedConfig) -> int:
    """Return the peak GPU bytes that steps take in addition to pages.

    Small steps come first, in which products are measured (`gemm_choice.py`): that takes a buffer which is no
    part of a step. Then the largest prefill and decoding step, the logits of as many prompts as can end in a
    step, and graphs run once; nothing is freed in between. Graphs hold the address of pages, which cannot be
    allocated before this, so these steps write to the scratch page. Memory outside PyTorch's allocator
    (kernels, NCCL, graphs) counts as well.
    """

    def used() -> int:
        return used_gpu_bytes(resolved.device)

    _run_small_steps(make_runner(), resolved)
    gc.collect()
    torch.cuda.empty_cache()  # else the runner would reuse memory that loading freed
    used_before = used()
    runner = make_runner()
    for lengths in (_longest_prompts(resolved), _max_prompts(resolved)):
        runner.execute(_prefill(resolved, lengths))
    taken = used() - used_before
    taken += runner.profile_run(_largest_decoding(resolved), used)
    del runner
    gc.collect()
    return taken


def _run_small_steps(runner: Runner, resolved: ResolvedConfig) -> None:
    """Run a short prompt, and a decoding step with as many drafts as possible."""
    runner.execute(_prefill(resolved, [min(resolved.max_model_len, _PROMPT_TOKENS)]))
    drafts = max(0, min(resolved.num_speculative_tokens, resolved.max_model_len - 2))
    runner.execute(dummy_step([1], [1 + drafts], [drafts]))


def _longest_prompts(resolved: ResolvedConfig) -> list[int]:
    length = min(resolved.max_model_len, resolved.max_num_batched_tokens)
    return [length] * min(resolved.max_num_batched_tokens // length, resolved.config.max_num_seqs)


def _max_prompts(resolved: ResolvedConfig) -> list[int]:
    count = min(resolved.config.max_num_seqs, resolved.max_num_batched_tokens)
    return [min(resolved.max_model_len, resolved.max_num_batched_tokens // count)] * count


def _largest_decoding(resolved: ResolvedConfig) -> SchedulerOutput:
    drafts = max(0, min(resolved.max_drafts, resolved.max_model_len - 2))
    count = max(1, min(resolved.config.max_num_seqs, resolved.max_num_batched_tokens // (1 + drafts)))
    return resolved.with_branches(dummy_step([1] * count, [1 + drafts] * count, [drafts] * count))


def _prefill(
    resolved: ResolvedConfig,
    lengths: list[int],
    num_pages: list[int] | None = None,
    sampling: SlotSampling = GREEDY,
) -> SchedulerOutput:
    none = [0] * len(lengths)
    prompts = [np.zeros(n, np.int32) for n in lengths]
    groups = resolved.pages.groups
    return dummy_step(
        none, lengths, none, prompts=prompts, num_pages=num_pages, groups=groups, sampling=sampling
    )


logger = logging.getLogger(__name__)


def check_invariance(resolved: ResolvedConfig, backend: Backend) -> None:
    """Log whether rows are batch-invariant. Raises ConfigError if not, and `batch_invariant` is set."""
    required = resolved.config.batch_invariant
    if resolved.attention_backend in ("triton", "flash_attn") and not (
        required and resolved.device.type == "cuda"
    ):
        return
    head_dims = sorted({dim for model in resolved.models for dim in model.head_dims})
    routed = any("routed experts" in model.features for model in resolved.models)
    holds = rows_are_invariant(backend, resolved.dtype, resolved.device, head_dims, routed=routed)
    logger.info("rows are batch-invariant: %s", holds)
    if required and not holds:
        raise ConfigError(
            f"batch_invariant does not hold here with dtype={str(resolved.dtype).removeprefix('torch.')} and "
            f"attention_backend={resolved.attention_backend}: a row's bits were seen to depend on its batch. "
            "Set dtype to float32, or leave attention_backend out.",
            param="batch_invariant",
        )
