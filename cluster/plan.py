"""The values that cross the line between deciding and doing: a step's plan and its result.

All are frozen and flat (struct of NumPy arrays), so that one pickle of a few hundred bytes carries a
step to the workers. Made by `scheduler.py`, executed by an `Executor`, committed by `engine.py`.

Shape legend: R requests in the step, M new page-table entries, W = 1 + largest number of drafts.

A step of one decoding request (`num_computed` = n, so token n is the anchor), 3 drafts:

    position       n        n+1   n+2   n+3
    row            anchor   d1    d2    d3        num_rows = 4, num_drafts = 3
    row's verdict  X_n+1    X_n+2 X_n+3 X_n+4     drafts count while d_k = X_n+k; then X itself (the bonus)

A prefill chunk has rows of known tokens only; `samples` is False until its last row is the last known
token, and then one token comes back.

Recurrent states (`states.py`), where a target has them, are never written by rows that may be rejected. A
worker remembers where each request's state stands and what the rows behind it would do to it:

    step i      state stands at n; rows n .. n+3 are computed from it, and it stays. d1, d2 stood, d3 did not
    step i + 1  first row n+3: the records of n .. n+2 are folded in, the state stands at n+3

so how many rows are folded is the difference of two positions, which the worker knows even where the plan
does not. Rows of a chunk without drafts stand for sure and are folded in at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .grammar import SlotGrammar
from .logprobs import StepLogprobs
from .token_rules import TokenRules

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Sampling state of a request slot, as the workers need it (see `SamplingParams`).

    `min_length` is absolute: tokens at positions below it cannot be any of `stop_token_ids` (the union of
    the model's end tokens, unless ignored, and the request's). `seed` is the 64-bit noise key. `rules` are
    None where the request has none, and so are `logprobs`, of how many likeliest tokens they are asked for,
    and `prompt_logprobs`, the same of the prompt's tokens: those at positions below `prompt_length`;
    and `grammar`.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_length: int
    stop_token_ids: tuple[int, ...]
    rules: TokenRules | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_length: int = 0
    grammar: SlotGrammar | None = None


class StateEntry(NamedTuple):
    """What a request that enters gets of the recurrent states.

    Attributes:
        state: is this request's as long as it has its slot.
        source: what it begins as, a copy of this saved state (perhaps itself); None: zeros.
        num_tokens: which the source has seen; this request's first row stands behind them.
    """

    state: int
    source: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StateSaves:
    """States to be saved in a step, int32 [M] each; a request's by rising position.

    Attributes:
        requests: which of the plan's (not its slot).
        positions: if that many of its tokens are computed behind this step and were not before, what its
            state is there is written, by the step's end, into
        states: the ids. Else nothing is written, and the next plans ask again.
    """

    requests: IntArray
    positions: IntArray
    states: IntArray


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that enters a slot in this step: new, or back after a preemption.

    `token_ids` int32 [num_tokens] holds all its known tokens (the prompt, and after a preemption what was
    generated); rows of prefix hits are not computed again but the tokens are here. `state` matters where the
    target has recurrent layers; all sources of a plan are read before any state is written in its step.
    `on_trial`: the candidate drafts for it, where there is one.
    """

    slot: int
    request_id: str
    token_ids: IntArray
    sampling: SlotSampling
    state: StateEntry | None = None
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class Trim:
    """How a step's drafts are cut once they are made and their margins known
    (`speculation/draft_trimming.py`).

    A margin is how sure a proposal is: by how much the best score is above the second best, as they are
    judged: logits after filters and masks, plus temperature times noise; inf where one token alone is
    possible. Where the drafter tells no margins nothing is cut. No token depends on it.

    Attributes:
        bias_K, slope_K: float32 [K], K most drafts of a request; draft k stands if those before it do with
            the chance sigmoid(bias_R[r] + bias_K[k] + slope_K[k] log(1 + margin)).
        bias_R: float32 [R], what a request's own past adds.
        weights_R: float32 [R], what a token of each request is worth; 1 by default, 0 where none comes.
        seconds_N: float32, at least num_batched_tokens + 1, seconds by rows of the target's pass; never
            falls. With a rate what a step takes in any case may be left out. Empty where `num_rows` is set.
        num_rows: of the pass in which drafts are verified, so many, or fewer if there are not enough drafts:
            chosen beforehand where passes have fixed sizes (`ExecutorInfo.row_buckets`). None: as many as pay
            by `seconds_N`.
        rate: worth per second that steps bring in the long run: cut where this one's worth - rate x seconds
            is greatest. 0 is not known: where its worth / seconds is.
    """

    bias_K: FloatArray
    slope_K: FloatArray
    bias_R: FloatArray
    weights_R: FloatArray
    seconds_N: FloatArray
    num_rows: int | None = None
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Arrays of length R are in the order in which rows are laid out.

    Attributes:
        step: counts up from 0.
        admitted: requests whose slot is to be (re)initialised before anything else.
        page_groups, page_slots, page_indices, page_ids: int32 [M]; set page_table[group, slot, index] = id
            first. Pages given back are not told: what stays in the table lies behind the group's window.
        slots: int32 [R], distinct.
        num_computed: int32 [R], tokens whose K/V exist; the first row's absolute position. -1 where it
            depends on a step in flight: the workers know it then.
        num_rows: int32 [R] >= 1, rows of the target's forward pass, drafts included; the most, if it trims.
        num_drafts: int32 [R], drafts to propose, and the most to verify; 0 = plain decoding or prefill.
        samples: bool [R], whether the last known token is among the rows, so that tokens come back.
        trim: how the drafts are cut before they are verified; None verifies all.
        writes_context: whether the drafter gets what this step computes. If not, no request of the step is
            drafted for before it has entered anew.
        saves: recurrent states to be saved, if any.
        num_batched_tokens, num_draft_tokens: rows and drafts of all requests together.
    """

    step: int
    admitted: tuple[AdmittedRequest, ...]
    page_groups: IntArray
    page_slots: IntArray
    page_indices: IntArray
    page_ids: IntArray
    slots: IntArray
    num_computed: IntArray
    num_rows: IntArray
    num_drafts: IntArray
    samples: BoolArray
    trim: Trim | None = None
    writes_context: bool = True
    saves: StateSaves | None = None
    num_batched_tokens: int = field(init=False, repr=False, compare=False)
    num_draft_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked for a dozen times a step: each sum of a short array takes two microseconds.
        object.__setattr__(self, "num_batched_tokens", int(self.num_rows.sum()))
        object.__setattr__(self, "num_draft_tokens", int(self.num_drafts.sum()))

    def verifying(self, num_drafts_R: IntArray) -> SchedulerOutput:
        """The plan when it has been trimmed: with so many drafts of each request, no more than planned."""
        num_rows_R = self.num_rows - self.num_drafts + num_drafts_R
        return replace(self, num_rows=num_rows_R, num_drafts=num_drafts_R, trim=None)

    @property
    def num_requests(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Seconds spent in the parts of a step, measured by the first target rank."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    inject_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s + self.inject_s


class ExpertReads(NamedTuple):
    """What routed layers cost a step, on the first target rank.

    Attributes:
        experts: whose weights were read, each layer's for itself.
        layers: routed layers that were run.
    """

    experts: int
    layers: int


@dataclass(frozen=True, slots=True)
class DrafterUse:
    """What an engine had of a drafter in a process of its own, which it may share with others.

    Attributes:
        steps: whose drafts it made.
        queue_s: seconds in which it could have begun something for this engine, and worked for others.
        served_s: seconds of its work for this engine: drafts, context, admissions.
    """

    steps: int = 0
    queue_s: float = 0.0
    served_s: float = 0.0

    def __add__(self, more: DrafterUse) -> DrafterUse:
        return DrafterUse(self.steps + more.steps, self.queue_s + more.queue_s, self.served_s + more.served_s)


NOT_A_NUMBER = -2  # in the place of a token whose logits hold NaN or infinity


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step.

    Attributes:
        step: of the plan.
        token_ids: int32 [R, W]; row r holds num_tokens[r] new tokens, then -1. The last of them is
            NOT_A_NUMBER where its logits were none: then there is no token.
        num_tokens: int32 [R]; accepted drafts + 1 where `samples`, else 0.
        timings: where the time went.
        logprobs: of the rows that chose tokens, for the requests that asked; None if nobody did.
        prompt_logprobs: of the rows of prompts before their last, in the same way, each for the token that
            follows it.
        num_drafts: int32 [R], drafts that were verified, where the plan trims; None: all of them.
        margins: float32 [R, K], of the drafts that were made, verified or not, K the most of a request in
            the plan; nan where there is none. None: the drafter tells none.
        expert_reads: None where the target has no routed layers.
        drafter_use: what was heard of it since the last result; None where no process of its own drafts.
    """

    step: int
    token_ids: IntArray
    num_tokens: IntArray
    timings: StepTimings = StepTimings()
    logprobs: StepLogprobs | None = None
    prompt_logprobs: StepLogprobs | None = None
    num_drafts: IntArray | None = None
    margins: FloatArray | None = None
    expert_reads: ExpertReads | None = None
    drafter_use: DrafterUse | None = None
