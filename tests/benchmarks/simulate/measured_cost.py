"""Measures the step times of a real engine and interpolates between them, for its simulation.

The steps are those of `bench step`, but submitted to an executor instead of a runner. Before every step the
requests enter anew, as after a prefix hit that covers all but their last token. A `SimulatedExecutor` uses
the table as its cost. Called by `validate_pair.py`.

Legend: B numbers of decoding requests, D numbers of drafts per request, C tokens of context, P numbers of
rows of prompts.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.executor import Executor, ExecutorInfo
from manta.cluster.step.scheduler_output import SchedulerOutput, StepTimings
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ROUNDS = 7  # runs of each step; their median counts
DRAFTS = (1, 3, 7, 15)
PROMPT_ROWS = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """A table of measured step times in seconds, interpolated linearly.

    Each axis ascends and has at least one point. Values outside it are clamped to its ends.

    Attributes:
        draft_BDC: time of drafting.
        rest_BDC: time of the step's other timings.
        prompt_P: time of a step that computes this many rows of one prompt and nothing else.
        host_s: time of a step outside its timings: planning, committing, passing data.
    """

    batches: tuple[int, ...]
    drafts: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_BDC: Floats
    rest_BDC: Floats
    prompt_rows: tuple[int, ...]
    prompt_P: Floats
    host_s: float = 0.0

    def __call__(self, plan: SchedulerOutput) -> StepTimings:
        """Return the times of a step. All decoding requests count with their mean drafts and context."""
        decodes_R = plan.samples & (plan.num_rows == plan.num_drafts + 1)
        batch, num_drafts = int(decodes_R.sum()), plan.num_draft_tokens
        context = float(np.maximum(plan.num_computed[decodes_R], 0).mean()) if batch else 0.0
        drafted = int(np.count_nonzero(plan.num_drafts))
        draft_s = 0.0 if not drafted else self._at(self.draft_BDC, drafted, num_drafts / drafted, context)
        non_draft_s = 0.0 if not batch else self._at(self.rest_BDC, batch, num_drafts / batch, context)
        rows = int(plan.num_rows[~decodes_R].sum())
        if rows:
            prompt_s = float(np.interp(rows, self.prompt_rows, self.prompt_P))
            non_draft_s = max(prompt_s, non_draft_s + prompt_s - float(self.prompt_P[0]))
        return StepTimings(draft_s=draft_s, verify_s=non_draft_s)

    def _at(self, values_BDC: Floats, batch: float, drafts: float, context: float) -> float:
        for axis, at in ((self.batches, batch), (self.drafts, drafts), (self.contexts, context)):
            values_BDC = _between(values_BDC, axis, at)
        return float(values_BDC)


def _between(values: Floats, axis: Sequence[int], at: float) -> Floats:
    """Interpolate `values` at `at` on their first axis."""
    high = min(max(bisect_right(axis, at), 1), len(axis) - 1)
    if len(axis) == 1:
        return values[0]
    low = high - 1
    share = min(max((at - axis[low]) / (axis[high] - axis[low]), 0.0), 1.0)
    return (1.0 - share) * values[low] + share * values[high]


def measure_costs(executor: Executor, max_num_seqs: int) -> MeasuredCost:
    """Measure steps of 1, 2, 4, ... requests with few and many drafts, at two contexts that fit."""
    info = executor.info
    batches = tuple(1 << n for n in range(max_num_seqs.bit_length()) if 1 << n <= max_num_seqs)
    drafts = tuple(sorted({0, *(min(count, info.num_speculative_tokens) for count in DRAFTS)}))
    longest = _longest(info, batches[-1], drafts[-1])
    contexts = tuple(sorted({min(32, longest), longest}))
    shape = len(batches), len(drafts), len(contexts)
    draft_BDC, rest_BDC = np.zeros(shape), np.zeros(shape)
    host_s: list[float] = []
    for place in np.ndindex(shape):
        i, j, k = place
        timings, outside_s = _decoding(executor, batches[i], drafts[j], contexts[k])
        draft_BDC[place], rest_BDC[place] = timings.draft_s, timings.total_s - timings.draft_s
        host_s.append(outside_s)
    rows = tuple(count for count in PROMPT_ROWS if count <= longest)
    prompt_P = np.array([_prompt(executor, count) for count in rows])
    return MeasuredCost(
        batches=batches,
        drafts=drafts,
        contexts=contexts,
        draft_BDC=draft_BDC,
        rest_BDC=rest_BDC,
        prompt_rows=rows,
        prompt_P=np.maximum.accumulate(prompt_P),
        host_s=statistics.median(host_s),
    )


def _longest(info: ExecutorInfo, batch: int, drafts: int) -> int:
    """Return the longest context, in tokens, for which `batch` requests have pages."""
    fits = min(info.num_pages) // batch * info.page_size // len(info.page_groups)
    return max(min(fits, info.max_model_len, 512) - 2 - drafts, 1)


def _decoding(executor: Executor, batch: int, drafts: int, context: int) -> tuple[StepTimings, float]:
    """Return the timings of a decoding step and the seconds outside them."""
    dice = np.random.default_rng(0)
    tokens = dice.integers(0, executor.info.vocab_size, (batch, context), dtype=np.int32)
    admission = _plan(
        executor, [context - 1] * batch, [1] * batch, [0] * batch, list(tokens), context + drafts
    )
    step = dummy_step([-1] * batch, [1 + drafts] * batch, [drafts] * batch)
    return _median([(admission, step)] * ROUNDS, executor)


def _prompt(executor: Executor, rows: int) -> float:
    tokens = np.random.default_rng(0).integers(0, executor.info.vocab_size, rows, dtype=np.int32)
    step = _plan(executor, [0], [rows], [0], [tokens], rows)
    timings, _ = _median([(None, step)] * ROUNDS, executor)
    return timings.total_s


def _plan(
    executor: Executor,
    computed: Sequence[int],
    rows: Sequence[int],
    drafts: Sequence[int],
    prompts: Sequence[np.ndarray],
    num_tokens: int,
) -> SchedulerOutput:
    """Return a plan in which requests enter, each with pages for `num_tokens` + 1 tokens."""
    info = executor.info
    pages = -(-(num_tokens + 1) // info.page_size)
    return dummy_step(
        computed,
        rows,
        drafts,
        prompts=prompts,
        num_pages=[pages] * len(rows),
        groups=info.page_groups,
    )


def _median(
    turns: Sequence[tuple[SchedulerOutput | None, SchedulerOutput]], executor: Executor
) -> tuple[StepTimings, float]:
    """Return the median of each part and of the seconds outside them. The first turn warms up."""
    measured: list[tuple[StepTimings, float]] = []
    for admission, step in turns:
        if admission is not None:
            executor.submit(admission)
            executor.collect()
        begin_s = time.perf_counter()
        executor.submit(step)
        timings = executor.collect().timings
        measured.append((timings, time.perf_counter() - begin_s - timings.total_s))
    parts = ("draft_s", "verify_s", "sample_s", "inject_s")
    medians = {
        name: statistics.median(getattr(timings, name) for timings, _ in measured[1:]) for name in parts
    }
    return StepTimings(**medians), statistics.median(outside_s for _, outside_s in measured[1:])
