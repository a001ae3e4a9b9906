"""The values passed between scheduler and executor: a step's plan and its result.

All are frozen and flat (structs of NumPy arrays), so that a pickle of a few hundred bytes carries a step to
the workers. Made by `cluster/scheduler/scheduler.py`, executed by an `Executor`, committed by
`cluster/engine/engine_core.py`.

Shape legend: R requests in the step, M new page-table entries, W = 1 + largest number of drafts.

A step of one decoding request (`num_computed` = n, so token n is the anchor), 3 drafts:

    position       n        n+1   n+2   n+3
    row            anchor   d1    d2    d3        num_rows = 4, num_drafts = 3
    row's choice   X_n+1    X_n+2 X_n+3 X_n+4     drafts are accepted while d_k = X_n+k; then X itself (bonus)

A prefill chunk only has rows of known tokens; `samples` is False until its last row is the last known token,
and then one token is returned.

Recurrent states (`cluster/kv_cache/recurrent_state_manager.py`) are never written by rows that may be
rejected. A worker remembers the position of each request's state, and records of what later rows would do to
it:

    step i      state is at n; rows n .. n+3 are computed from it without changing it. d1, d2 accepted, d3 not
    step i + 1  first row n+3: the records of n .. n+2 are folded in, the state is at n+3

So the number of folded rows is the difference of two positions, which the worker knows even if the plan does
not. Rows of a chunk without drafts are final and are folded in at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..request.logprobs import StepLogprobs
from ..request.request import LogitsProcessorParams
from ..request.structured_outputs import SlotGrammar

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Sampling state of a request's slot, as the workers need it (see `SamplingParams`).

    Attributes:
        seed: the 64-bit noise key.
        min_length: tokens at positions below it cannot be any of `stop_token_ids`.
        stop_token_ids: the model's end tokens, unless ignored, and the request's.
        logprobs: number of most likely tokens to return; None for no log probabilities.
        prompt_logprobs: the same for the prompt's tokens, at positions below `prompt_length`.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_length: int
    stop_token_ids: tuple[int, ...]
    rules: LogitsProcessorParams | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_length: int = 0
    grammar: SlotGrammar | None = None


class TreeShape(NamedTuple):
    """The shape of a step's draft trees; `num_drafts` of the plan are nodes.

    Attributes:
        depth, width: most drafts on a path, and most children of a node.
        factors: of the estimated chances, `width` numbers: of candidates after another one than the best; of
            the second, third, .. best candidate (`speculation/tree_policy.py`).
        fork: the same where drafts and copies differ, of those off the main path.
    """

    depth: int
    width: int
    factors: tuple[float, ...]
    fork: float = 1.0


class StateEntry(NamedTuple):
    """The recurrent state that a request gets when it enters.

    It begins as a copy of the saved state `source` (may be the same one; None for zeros), which has seen
    `num_tokens` tokens; the request's first row follows them.
    """

    state: int
    source: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StateSaves:
    """States to save in a step, int32 [M] each, ascending by position within a request.

    Attributes:
        requests: indices in the plan (not slots).
        positions: number of tokens in the saved state, if this step computes the last of them. Otherwise
            nothing is written, and later plans request it again.
        states: ids to write the states to.
    """

    requests: IntArray
    positions: IntArray
    states: IntArray


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that enters a slot in this step: new, or after a preemption.

    Attributes:
        token_ids: int32 [num_tokens], all known tokens (the prompt, and generated ones after a preemption),
            including those of prefix hits, which are not computed again.
        state: for targets with recurrent layers. All sources of a plan are read before any state is written
            in its step.
        cache_salt: see `Request.cache_salt`.
    """

    slot: int
    request_id: str
    token_ids: IntArray
    sampling: SlotSampling
    state: StateEntry | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Trim:
    """Parameters for trimming a step's drafts once their margins are known (`speculation/draft_trimming.py`).

    A draft's margin is the difference between the best and the second best score: logits after filters and
    masks, plus temperature times noise; inf if only one token is possible. Nothing is trimmed if the drafter
    gives no margins. Trimming changes no token.

    Attributes:
        bias_K, slope_K: float32 [K], K most drafts of a request. Draft k is accepted, if those before it are,
            with the probability sigmoid(bias_R[r] + bias_K[k] + slope_K[k] log(1 + margin)).
        bias_R: float32 [R], contribution of a request's own history.
        weights_R: float32 [R], value of a token of each request; 1 by default, 0 for requests that get none.
        seconds_N: float32, at least num_batched_tokens + 1, seconds by rows of the target's pass; never
            decreases. With a rate, the fixed part of a step may be left out. Empty if `num_rows` is set, and
            drafts form chains.
        num_rows: rows of the verification pass (fewer if there are not enough drafts), chosen beforehand
            where passes have fixed sizes (`ExecutorInfo.row_buckets`). None: as many as pay off by
            `seconds_N`.
        rate: long-run value per second of steps: maximize value - rate x seconds of this step. 0 if unknown:
            maximize value / seconds.
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
    """One step. Arrays of length R are in the order of the rows.

    Attributes:
        step: counts up from 0.
        admitted: requests that get (re)initialized slots first.
        page_groups, page_slots, page_indices, page_ids: int32 [M]; then set page_table[group, slot, index] =
            id. Freed pages are not listed, as their entries are outside of the group's window.
        slots: int32 [R], distinct.
        num_computed: int32 [R], tokens with K/V, and so the first row's position. -1 if it depends on
            a step in flight; the workers know it then.
        num_rows: int32 [R] >= 1, rows of the target's forward pass, including drafts; an upper bound with a
            trim.
        num_drafts: int32 [R], drafts to propose, and most drafts to verify; 0 for plain decoding or prefill.
        samples: bool [R], whether the last known token is among the rows, so that tokens are returned.
        trim: how drafts are trimmed before they are verified; None verifies all.
        writes_context: whether the drafter's context of this step is written. If not, no request of the step
            is drafted for before it has entered again.
        tree: the shape of draft trees; None if drafts form chains. With a tree a request verifies at most
            `num_drafts` nodes, of which at most `tree.depth` are accepted.
        num_requests, num_batched_tokens, num_draft_tokens: R; rows and drafts of all requests together.
        needs_candidates: whether drafts are chosen among several candidates of each position.
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
    tree: TreeShape | None = None
    num_requests: int = field(init=False, repr=False, compare=False)
    num_batched_tokens: int = field(init=False, repr=False, compare=False)
    num_draft_tokens: int = field(init=False, repr=False, compare=False)
    needs_candidates: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Read a dozen times per step, and each sum of a short array takes two microseconds.
        object.__setattr__(self, "num_requests", len(self.slots))
        object.__setattr__(self, "num_batched_tokens", int(self.num_rows.sum()))
        object.__setattr__(self, "num_draft_tokens", int(self.num_drafts.sum()))
        object.__setattr__(self, "needs_candidates", self.tree is not None)

    @property
    def block_drafts(self) -> IntArray:
        """The drafts that each request's block has, int32 [R]: all of them, or as deep as a tree is."""
        return (
            self.num_drafts if self.tree is None else np.minimum(self.num_drafts, np.int32(self.tree.depth))
        )

    @property
    def is_trimmed_by_host(self) -> bool:
        """Whether the host chooses which drafts are verified, which takes it time: chains that are trimmed
        without a given number of rows. Growing a tree includes its trim, and a GPU trims in its step.
        """
        return self.tree is None and self.trim is not None and self.trim.num_rows is None

    def with_num_drafts(self, num_drafts_R: IntArray) -> SchedulerOutput:
        """Return the trimmed plan, with these numbers of drafts, which are at most the planned ones."""
        num_rows_R = self.num_rows - self.num_drafts + num_drafts_R
        return replace(self, num_rows=num_rows_R, num_drafts=num_drafts_R, trim=None)


@dataclass(frozen=True, slots=True)
class StepTimings:
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    inject_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s + self.inject_s


class TreeOutcome(NamedTuple):
    """The acceptance of a step's draft trees. A *main path* is the chain of a request's best candidates.

    Attributes:
        num_main_drafts_R: verified nodes of the main path, int32 [R].
        num_main_accepted_R: nodes accepted before the accepted path leaves it, int32 [R].
        ranks_RW: rank of each node of the accepted paths among the children of its parent, from 0; int32, -1
            past a path's end.
        expected_F, accepted_F: sum of the chances, and number of accepted nodes, among the children of
            visited nodes, by factor of `TreeShape`, the fork's last; fp32.
        depths_R, widths_R: length of the longest path, and most nodes of one depth; int32 [R], 0 where drafts
            do not branch.
    """

    num_main_drafts_R: IntArray
    num_main_accepted_R: IntArray
    ranks_RW: IntArray
    expected_F: FloatArray
    accepted_F: FloatArray
    depths_R: IntArray
    widths_R: IntArray


class TreeGain(NamedTuple):
    """The expected gain of a step's draft trees, compared with their main paths alone (`draft_trimming.py`).

    `worth` is worth of tokens less the price of rows; `grow_s` are the seconds in which they were grown, and
    `num_nodes` as many as would have been best to verify.
    """

    worth: float
    grow_s: float
    num_nodes: int = 0


class ExpertReads(NamedTuple):
    """Experts read in a step, summed over `layers` passes through routed layers, on the first rank."""

    experts: int
    layers: int


@dataclass(frozen=True, slots=True)
class DrafterUse:
    """Steps in which an engine used a remote drafter, and the seconds of its work for this engine.

    `queue_s` are seconds in which it could have worked for this engine, but worked for others.
    """

    steps: int = 0
    queue_s: float = 0.0
    served_s: float = 0.0

    def __add__(self, more: DrafterUse) -> DrafterUse:
        return DrafterUse(self.steps + more.steps, self.queue_s + more.queue_s, self.served_s + more.served_s)


NOT_A_NUMBER = -2  # replaces a token whose logits contain NaN or infinity


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        step: number of the plan.
        token_ids: int32 [R, W]; row r holds num_tokens[r] new tokens, then -1. The last of them is
            NOT_A_NUMBER if its logits were invalid.
        num_tokens: int32 [R]; accepted drafts + 1 where `samples`, else 0.
        timings: seconds by part.
        logprobs: of the rows that sampled tokens, for requests that want them; None if none does.
        prompt_logprobs: of prompt rows before the last, each for the token that follows it.
        num_drafts: int32 [R], verified drafts, if the plan has a trim; None for all of them.
        margins: float32 [R, K], of all drafts, verified or not, K the most drafts of a request in the plan;
            nan where there is none. None if the drafter gives none.
        trees: of steps with draft trees; None if all drafts were chains.
        tree_gain: of steps that grew trees, if the plan's trim has a rate.
        expert_reads: None if the target has no routed layers.
        drafter_use: a remote drafter's use since the last result; None without one.
        is_copied: bool [R], requests with drafts copied beside a drafter (`suffix_drafts`); else None.
        is_pass_skipped: all drafts are copies, and the drafter's pass was left out.
    """

    step: int
    token_ids: IntArray
    num_tokens: IntArray
    timings: StepTimings = StepTimings()
    logprobs: StepLogprobs | None = None
    prompt_logprobs: StepLogprobs | None = None
    num_drafts: IntArray | None = None
    margins: FloatArray | None = None
    trees: TreeOutcome | None = None
    tree_gain: TreeGain | None = None
    expert_reads: ExpertReads | None = None
    drafter_use: DrafterUse | None = None
    is_copied: BoolArray | None = None
    is_pass_skipped: bool = False

    def branches(self, slots_R: IntArray, remaining: slice | BoolArray) -> dict[int, tuple[int, ...]]:
        """Return the ranks of accepted drafts by slot, of the remaining requests for which one is not 0."""
        if self.trees is None:
            return {}
        ranks_RW = self.trees.ranks_RW[remaining]
        requests = np.flatnonzero((ranks_RW > 0).any(axis=1)).tolist()
        return {int(slots_R[r]): tuple(ranks_RW[r][ranks_RW[r] >= 0].tolist()) for r in requests}
