"""Interprets a step's result for its sequences: how many tokens are new, and which sequences end.

Workers already prevent stop tokens before `min_length`, so only the first token that ends a sequence must be
found. A table of tokens that would end any sequence selects the few rows that need a closer look. Changes
nothing itself. Called by `cluster/scheduler/scheduler.py`.

Shape legend: R requests in the step, W = 1 + largest number of drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..request.logprobs import RowLogprobs, StepLogprobs, TokenLogprobs
from ..request.request import FinishReason
from .scheduler_output import (
    NOT_A_NUMBER,
    BoolArray,
    IntArray,
    SchedulerOutput,
    SlotSampling,
    StepResult,
)
from .sequence import SlotTable


class SequenceUpdate(NamedTuple):
    """The result of a step for one sequence. (A tuple, as hundreds are made per step.)

    Attributes:
        token_ids: new tokens, up to the end of the sequence; includes a token that ends it.
        finish_reason: why it ended; None if it continues.
        stop_reason: the stop token that ended it; None if that was the model's own end token.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_drafted: drafts verified in this step.
        num_accepted: accepted drafts among `token_ids`.
        branches: rank of each accepted draft among the alternatives at its position, 0 for the best; ()
            if all are the best.
        queue_s: time from its arrival until it first ran.
        prompt_logprobs: with the first tokens, if requested: of all prompt tokens but the first.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | None
    num_cached_tokens: int
    num_drafted: int
    num_accepted: int
    branches: tuple[int, ...] = ()
    queue_s: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: RowLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Arrays of length R, as in the plan, but without the sequences that have left since it was made.

    Attributes:
        slots, samples: from the plan.
        num_known: rows of known tokens.
        num_planned, num_drafts: most drafts, from the plan, and verified ones.
        token_ids: [R, W], from the result.
        num_out, num_accepted: new tokens, up to the end of the sequence, and accepted drafts among them.
        num_computed: tokens of the sequence with K/V that exist now.
        stopped, full: the last new token is a stop token; the sequence has reached its maximum length.
        failed: logits after the new tokens, or log probabilities, are NaN or infinite.
        branches: by slot, see `SequenceUpdate`.
        logprobs, prompt_logprobs: by slot, of the new tokens and of prompt rows, if requested.
    """

    slots: IntArray
    num_known: IntArray
    num_planned: IntArray
    num_drafts: IntArray
    samples: BoolArray
    token_ids: IntArray
    num_out: IntArray
    num_accepted: IntArray
    num_computed: IntArray
    stopped: BoolArray
    full: BoolArray
    failed: BoolArray
    branches: Mapping[int, tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    prompt_logprobs: Mapping[int, RowLogprobs]


class CompletedStep(NamedTuple):
    """A committed step: the one record that every observer of the scheduler gets.

    Attributes:
        plan, result: what was planned, and what the executor returned.
        outcome: the result for the requests that have not left.
        remaining_R: mask of these in the plan.
        planned_s, ended_s: when it was planned and committed.
    """

    plan: SchedulerOutput
    result: StepResult
    outcome: StepOutcome
    remaining_R: BoolArray
    planned_s: float
    ended_s: float


def read_result(
    table: SlotTable, plan: SchedulerOutput, remaining_R: BoolArray, result: StepResult
) -> StepOutcome:
    """Interpret a step's result for the sequences of the plan that have not left since."""
    assert result.step == plan.step, f"result of step {result.step} for plan {plan.step}"
    verified_R = plan.num_drafts if result.num_drafts is None else result.num_drafts
    assert (verified_R <= plan.num_drafts).all(), "more drafts than planned"
    assert (result.num_tokens <= np.where(plan.samples, verified_R + 1, 0)).all(), "more than planned"
    assert (result.num_tokens >= plan.samples).all(), "a sampled request must get a token"
    remaining = slice(None) if remaining_R.all() else remaining_R  # a slice costs almost nothing
    logprobs, prompts = result.logprobs, result.prompt_logprobs
    slots_R, drafts_R = plan.slots[remaining], plan.num_drafts[remaining]
    known_R = plan.num_rows[remaining] - drafts_R
    token_ids_RW, num_tokens_R = result.token_ids[remaining], result.num_tokens[remaining]
    failed_R, num_tokens_R = _find_failed(result, remaining_R, token_ids_RW, num_tokens_R)
    missing_R = table.max_length_S[slots_R] - table.num_tokens_S[slots_R]
    kept_R = np.minimum(num_tokens_R, missing_R)  # a path of a tree may be longer
    num_out_R, stopped_R = _cut_at_stops(table, slots_R, token_ids_RW, kept_R)
    return StepOutcome(
        slots=slots_R,
        num_known=known_R,
        num_planned=drafts_R,
        num_drafts=verified_R[remaining],
        samples=plan.samples[remaining],
        token_ids=token_ids_RW,
        num_out=num_out_R,
        num_accepted=np.minimum(num_out_R, np.maximum(num_tokens_R - 1, 0)),
        # All rows of known tokens, and all new tokens but the last, which is the new anchor.
        num_computed=table.num_computed_S[slots_R] + known_R + np.maximum(num_out_R - 1, 0),
        stopped=stopped_R,
        full=num_out_R == missing_R,
        failed=failed_R & ~stopped_R,
        branches=result.branches(slots_R, remaining),
        logprobs={} if logprobs is None else _logprobs(table, remaining_R, slots_R, num_out_R, logprobs),
        prompt_logprobs={} if prompts is None else _prompt_logprobs(plan, remaining_R, prompts),
    )


def make_updates(table: SlotTable, outcome: StepOutcome) -> list[SequenceUpdate]:
    """Return one update for each sequence that got tokens or failed."""
    updates: list[SequenceUpdate] = []
    counts = (outcome.num_out, outcome.num_drafts, outcome.num_accepted)
    flags = (outcome.stopped, outcome.full, outcome.failed)
    # Plain lists, as reading NumPy scalars one by one would take longer than everything else.
    columns = [column.tolist() for column in (outcome.slots, outcome.token_ids, *counts, *flags)]
    rows = zip(*columns, strict=True)
    for slot, token_ids, count, num_drafted, num_accepted, stopped, full, failed in rows:
        if not (count or failed):
            continue
        sequence = table.sequences[slot]
        reason: FinishReason | None = "stop" if stopped else "length" if full else None
        reason = "error" if failed else reason
        prompts = sequence.prompt_logprobs
        updates.append(
            SequenceUpdate(
                sequence.request.request_id,
                tuple(token_ids[:count]),
                reason,
                sequence.stop_reason(token_ids[count - 1]) if stopped else None,
                sequence.num_cached_tokens or 0,
                num_drafted,
                num_accepted,
                outcome.branches.get(slot, ())[:num_accepted],
                sequence.queue_s,
                outcome.logprobs.get(slot, ()),
                RowLogprobs.joined(prompts) if prompts else None,
            )
        )
    return updates


def _logprobs(
    table: SlotTable, remaining_R: BoolArray, slots_R: IntArray, num_out_R: IntArray, found: StepLogprobs
) -> Mapping[int, tuple[TokenLogprobs, ...]]:
    """Return the log probabilities by slot, of the requests that want them and have not left."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    places = np.flatnonzero(remaining_R).tolist()
    for place, slot, count in zip(places, slots_R.tolist(), num_out_R.tolist(), strict=True):
        num_top = table.sequences[slot].sampling.logprobs
        if num_top is not None and count:
            logprobs[slot] = found.of(place, count, num_top).tokens()
    return logprobs


def _prompt_logprobs(
    plan: SchedulerOutput, remaining_R: BoolArray, logprobs: StepLogprobs
) -> Mapping[int, RowLogprobs]:
    """Return the prompt log probabilities by slot, of the requests that want them and have not left."""
    num_top = logprobs.rows.top_ids_YL.shape[1]
    return {
        int(plan.slots[place]): logprobs.of(place, count, num_top)
        for place, count in zip(logprobs.requests_A.tolist(), logprobs.counts_A.tolist(), strict=True)
        if remaining_R[place]
    }


def _find_failed(
    result: StepResult, remaining_R: BoolArray, token_ids_RW: IntArray, num_tokens_R: IntArray
) -> tuple[BoolArray, IntArray]:
    """Return which sequences have invalid logits or log probabilities, and the valid tokens of each."""
    failed_RW = token_ids_RW == NOT_A_NUMBER
    step_logprobs = [each for each in (result.logprobs, result.prompt_logprobs) if each is not None]
    any_nan = any(np.isnan(each.rows.logprobs_Y).any() for each in step_logprobs)
    if not (any_nan or failed_RW.any()):  # the usual case
        return np.zeros(len(num_tokens_R), dtype=np.bool_), num_tokens_R
    failed_R = failed_RW.any(axis=1)
    num_tokens_R = np.where(failed_R, failed_RW.argmax(axis=1), num_tokens_R).astype(np.int32)
    _add_failed_logprobs(step_logprobs, remaining_R, failed_R, num_tokens_R)
    return failed_R, num_tokens_R


def _add_failed_logprobs(
    step_logprobs: list[StepLogprobs], remaining_R: BoolArray, failed_R: BoolArray, num_tokens_R: IntArray
) -> None:
    """Mark sequences with invalid log probabilities as failed, without new tokens, in place."""
    place_of = {place: row for row, place in enumerate(np.flatnonzero(remaining_R).tolist())}
    for each in step_logprobs:
        for place, count in zip(each.requests_A.tolist(), each.counts_A.tolist(), strict=True):
            if place in place_of and count and np.isnan(each.of(place, count, 0).logprobs_Y).any():
                failed_R[place_of[place]], num_tokens_R[place_of[place]] = True, 0


def _cut_at_stops(
    table: SlotTable, slots_R: IntArray, token_ids_RW: IntArray, num_tokens_R: IntArray
) -> tuple[IntArray, BoolArray]:
    num_out_R, stopped_R = num_tokens_R.copy(), np.zeros(len(slots_R), dtype=np.bool_)
    real_RW: BoolArray = np.arange(token_ids_RW.shape[1], dtype=np.int32) < num_tokens_R[:, None]
    may_stop_RW: BoolArray = (table.stop_uses_V[token_ids_RW] > 0) & real_RW
    for row in np.flatnonzero(may_stop_RW.any(axis=1)).tolist():
        slot = int(slots_R[row])
        sampling, begin = table.sequences[slot].sampling, int(table.num_tokens_S[slot])
        count = _count_to_stop(sampling, begin, token_ids_RW[row], may_stop_RW[row])
        if count is not None:
            num_out_R[row], stopped_R[row] = count, True
    return num_out_R, stopped_R


def _count_to_stop(
    sampling: SlotSampling, begin: int, token_ids_W: IntArray, may_stop_W: BoolArray
) -> int | None:
    """Return the number of tokens up to the first that ends a sequence of `begin` tokens; None without."""
    for column in np.flatnonzero(may_stop_W).tolist():
        # An end token before min_length was the only one that the grammar and other rules allowed.
        may_stop = begin + column >= sampling.min_length or sampling.grammar is not None
        if may_stop and int(token_ids_W[column]) in sampling.stop_token_ids:
            return column + 1
    return None
