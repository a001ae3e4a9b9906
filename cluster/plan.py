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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .grammar import SlotGrammar
from .logprobs import StepLogprobs
from .token_rules import TokenRules

IntArray = NDArray[np.int32]
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


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that enters a slot in this step: new, or back after a preemption.

    `token_ids` int32 [num_tokens] holds all its known tokens (the prompt, and after a preemption what was
    generated); rows of prefix hits are not computed again but the tokens are here.
    """

    slot: int
    request_id: str
    token_ids: IntArray
    sampling: SlotSampling


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
        num_rows: int32 [R] >= 1, rows of the target's forward pass, drafts included.
        num_drafts: int32 [R], drafts to propose and verify; 0 = plain decoding or prefill.
        samples: bool [R], whether the last known token is among the rows, so that tokens come back.
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

    @property
    def num_requests(self) -> int:
        return len(self.slots)

    @property
    def num_batched_tokens(self) -> int:
        return int(self.num_rows.sum())


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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step.

    Attributes:
        step: of the plan.
        token_ids: int32 [R, W]; row r holds num_tokens[r] new tokens, then -1.
        num_tokens: int32 [R]; accepted drafts + 1 where `samples`, else 0.
        timings: where the time went.
        logprobs: of the rows that chose tokens, for the requests that asked; None if nobody did.
        prompt_logprobs: of the rows of prompts before their last, in the same way, each for the token that
            follows it.
    """

    step: int
    token_ids: IntArray
    num_tokens: IntArray
    timings: StepTimings = StepTimings()
    logprobs: StepLogprobs | None = None
    prompt_logprobs: StepLogprobs | None = None
