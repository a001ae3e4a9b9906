"""Triton version of `drafter/step/sampling/verification.py` and of `RequestStates.advance`.

One launch each; the host reads nothing and grids follow from shapes, so all can be captured in a CUDA graph.
Called by `actors/targets/runners/step_passes.py`: `trim_drafts` before rows are laid out,
`accept_and_advance` after sampling, and `mark_not_numbers` after that for prompts. `tree_rows.py` does the
first two for draft trees.

`trim_drafts` is `trimmed` of `cluster/speculation/draft_trimming.py` for a fixed number of rows, that of a
graph's pass: each request's newest token gets one, and the drafts of greatest worth get the others, so no row
is empty while a draft is left. Ties go to the earlier row. Worth never rises along a request, so the kept
drafts are a prefix. Rows are numbered as in the blocks that the drafter ran:

    rows of blocks    a   d1   d2   d3   b   d1   d2        cu_rows 0 4 7
    worth            inf  .9   .5   .1  inf  .8   .7        5 rows: the threshold is .7
    kept              x    x             x    x    x        cu_rows 0 2 5

Legend: R requests of a step, X sampled rows, W = 1 + most drafts, N rows, K most drafts of the engine, D =
W - 1 most of a request in this pass.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.speculation.draft_tree import AcceptanceCurve
from ....cluster.step.scheduler_output import NOT_A_NUMBER, Trim
from .inputs.row_layout import DeviceStepRequests, Ints, SlotTables

_WARP = 32
_CHECKING_PROGRAMS = 256  # of a request, at most
_NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER)


def accept_and_advance(
    chosen_X: Tensor, requests: DeviceStepRequests, tables: SlotTables, outcome_RW1: Tensor
) -> None:
    """Verify the drafts, write the step's new tokens after the known ones, and advance `num_computed`.

    A request's last rows are its drafts. Its sampled rows begin at its last known row; the token sampled
    after the last accepted draft is new too. A request that does not sample only advances.

        row          known  known  draft1 draft2 draft3
        sampled                    X1     X2     X3     X4       X1 is chosen[first_chosen]
        draft1 = X1, draft2 != X2: new tokens X1 X2, num_tokens 2, num_computed + 3

    Args:
        chosen_X: the target's sampled tokens, int64; each request's begin at its `first_chosen`.
        outcome_RW1: int32 [R, W + 1], written: the new tokens of each request, then -1; in the last column
            their number.
    """
    num_requests, width = len(requests.slots_R), requests.max_drafts + 1
    assert outcome_RW1.shape == (num_requests, width + 1), "room for all tokens, and their number"
    # One warp reads all drafts of a request before it overwrites them.
    _accept_and_advance[num_requests,](
        chosen_X, requests.first_chosen_R, requests.slots_R, requests.cu_rows_R1, requests.num_drafts_R,
        requests.samples_R, tables.token_ids, tables.num_computed, outcome_RW1, tables.token_ids.stride(0),
        width,
        LANES=max(_WARP, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip


# After trimming, `num_drafts` is a view into the outcome with any alignment.
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["num_drafts"])
def _accept_and_advance(
    chosen, first_chosen, slots, cu_rows, num_drafts, samples, token_ids, num_computed, outcome,
    token_stride, width,
    LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    outcome += request * (width + 1)
    count = tl.load(cu_rows + request + 1) - tl.load(cu_rows + request)
    if count == 0:
        tl.store(outcome + lanes, -1, mask=lanes < width)
        tl.store(outcome + width, 0)
        return
    slot = tl.load(slots + request)
    drafts = tl.load(num_drafts + request)
    is_sampled = tl.load(samples + request) != 0
    num_known = tl.load(num_computed + slot) + count - drafts
    after = token_ids + slot.to(tl.int64) * token_stride + num_known
    is_judged = is_sampled & (lanes <= drafts)
    verdict = tl.load(
        chosen + tl.load(first_chosen + request, mask=is_sampled, other=0) + lanes, mask=is_judged, other=-1
    )
    draft = tl.load(after + lanes, mask=lanes < drafts, other=-1)
    is_accepted = (lanes < drafts) & (draft == verdict)
    num_accepted = tl.min(
        tl.where(is_accepted, LANES, lanes), 0
    )  # the first mismatch; lane `drafts` always is one
    is_new = is_judged & (lanes <= num_accepted)
    tl.store(after + lanes, tl.maximum(verdict, 0), mask=is_new)  # NOT_A_NUMBER cannot be an input token
    tl.store(num_computed + slot, num_known + tl.where(is_sampled, num_accepted, 0))
    tl.store(outcome + lanes, tl.where(is_new, verdict, -1).to(tl.int32), mask=lanes < width)
    tl.store(outcome + width, tl.where(is_sampled, num_accepted + 1, 0))


def mark_not_numbers(hidden_NH: Tensor, requests: DeviceStepRequests, outcome_RW1: Tensor) -> None:
    """Set the token of prompts of which any row holds NaN or infinity to NOT_A_NUMBER, sampled or not.

    K/V stores zeros for such values, so later rows look sound. Decoding requests, with all rows sampled,
    are judged by their logits alone: there is no launch.

    Args:
        hidden_NH: the rows' last hidden states, contiguous.
        outcome_RW1: int32 [R, 2] of prompts, as `accept_and_advance` wrote it.
    """
    if requests.sampled_X is None:
        return
    assert hidden_NH.is_contiguous() and len(hidden_NH) == requests.num_rows, "a hidden state for each row"
    assert requests.max_drafts == 0 and outcome_RW1.is_contiguous(), "of each request one token and a number"
    width = hidden_NH.shape[1]
    _mark_not_numbers[len(requests.slots_R), min(requests.max_rows, _CHECKING_PROGRAMS)](
        hidden_NH, requests.cu_rows_R1, outcome_RW1, WIDTH=width, BLOCK=triton.next_power_of_2(width)
    )


@triton.jit(do_not_specialize_on_alignment=["outcome"])
def _mark_not_numbers(hidden, cu_rows, outcome, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    request, columns = tl.program_id(0), tl.arange(0, BLOCK)
    is_broken = tl.zeros([BLOCK], tl.int1)
    first = tl.load(cu_rows + request) + tl.program_id(1)
    for offset in range(0, tl.load(cu_rows + request + 1) - first, tl.num_programs(1)):
        row = (first + offset).to(tl.int64)
        h = tl.load(hidden + row * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        is_broken |= ~(tl.abs(h.to(tl.float32)) < float("inf"))
    if tl.max(is_broken.to(tl.int32), 0) > 0:
        tl.store(outcome + 2 * request, _NOT_A_NUMBER)


REQUESTS_AT_ONCE = 128  # per iteration
_ALIGNMENT = 4  # values: 16 bytes
_MAX_MARGIN = tl.constexpr(1e6)  # as in `cluster/speculation/draft_trimming.py`


@dataclass(frozen=True, slots=True)
class TrimLists:
    """A plan's acceptance parameters and request weights, as fp32 views of uploaded values.

    Attributes:
        weights_R, bias_R: per request, padded to capacity.
        bias_K, slope_K: per draft position.
        factors_T: of draft trees, see `TreeShape.factors`; empty without trees.
    """

    weights_R: Tensor
    bias_R: Tensor
    bias_K: Tensor
    slope_K: Tensor
    factors_T: Tensor

    @staticmethod
    def num_values(room: int, num_drafts: int, num_factors: int = 0) -> int:
        """Return the number of values of `pack`, a multiple of 16 bytes."""
        return sum(size for _, size in TrimLists._parts(room, num_drafts, num_factors))

    @staticmethod
    def _parts(room: int, num_drafts: int, num_factors: int) -> list[tuple[int, int]]:
        """Return used and reserved values of each attribute, in order: what is packed, and its views."""
        lengths = (room, room, num_drafts, num_drafts, num_factors)
        return [(length, _aligned(length)) for length in lengths]

    @staticmethod
    def pack(
        trim: Trim | None,
        requests_G: NDArray[np.intp],
        room: int,
        num_drafts: int,
        factors: Sequence[float] = (),
    ) -> Ints:
        """Pack the parameters as int32 words; without a trim the prior's curve, and weights of 0.

        Args:
            requests_G: indices in the plan of the participating requests.
            room: capacity in requests, a multiple of 4.
            num_drafts: K.
        """
        parts = TrimLists._parts(room, num_drafts, len(factors))
        values = np.zeros(TrimLists.num_values(room, num_drafts, len(factors)), dtype=np.float32)
        ends = np.cumsum([reserved for _, reserved in parts])[:-1]
        weights_R, bias_R, bias_K, slope_K, factors_T = np.split(values, ends)
        factors_T[: len(factors)] = factors
        # By the prior trees grow on the host, too.
        bias_K[:num_drafts], slope_K[:num_drafts] = AcceptanceCurve.prior(num_drafts)
        if trim is not None:
            weights_R[: len(requests_G)] = trim.weights_R[requests_G]
            bias_R[: len(requests_G)] = trim.bias_R[requests_G]
            bias_K[: len(trim.bias_K)], slope_K[: len(trim.bias_K)] = trim.bias_K, trim.slope_K
        return values.view(np.int32)

    @classmethod
    def views_of(cls, values: Tensor, room: int, num_drafts: int, num_factors: int = 0) -> TrimLists:
        """Return views of packed values on the device."""
        parts = TrimLists._parts(room, num_drafts, num_factors)
        packed = values[: cls.num_values(room, num_drafts, num_factors)].view(torch.float32)
        reserved = packed.split([size for _, size in parts])
        return cls(*(part[:used] for part, (used, _) in zip(reserved, parts, strict=True)))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def trim_drafts(
    drafted: DeviceStepRequests,
    margins_N: Tensor,
    lists: TrimLists,
    num_rows: int,
    num_drafts_R: Tensor,
    margins_RD: Tensor,
) -> DeviceStepRequests:
    """Return the requests with the drafts to verify in a pass of `num_rows` rows.

    Args:
        drafted: requests with all their drafts; `num_rows` is at least their number.
        margins_N: fp32, by row of the blocks; values of first rows and of padding are ignored.
        num_drafts_R: int32, written: verified drafts per request.
        margins_RD: fp32, written: the margins of all drafts, nan where there is none.
    """
    num_requests, maximum = len(drafted.slots_R), drafted.max_drafts
    assert margins_RD.shape == (num_requests, maximum) and len(num_drafts_R) == num_requests, (
        "a place for each"
    )
    assert maximum <= len(lists.bias_K), "chances are known"
    places = min(num_requests * (maximum + 1), len(margins_N))
    cu_rows_R1 = torch.empty_like(drafted.cu_rows_R1)
    worths_N = torch.empty(places, dtype=torch.float32, device=margins_N.device)
    kept_before_N1 = torch.empty(places + 1, dtype=torch.int32, device=margins_N.device)
    # `PLACES` is that of the largest step: one compiled kernel for all.
    _trim_drafts[1,](
        drafted.cu_rows_R1, drafted.num_drafts_R, margins_N, lists.weights_R, lists.bias_R, lists.bias_K,
        lists.slope_K, worths_N, kept_before_N1, cu_rows_R1, num_drafts_R, margins_RD, num_requests,
        num_rows, maximum,
        REQUESTS=REQUESTS_AT_ONCE, PLACES=triton.next_power_of_2(len(margins_N)), num_warps=8,
    )  # fmt: skip
    return with_drafts(drafted, cu_rows_R1, num_drafts_R, num_rows)


def with_drafts(
    drafted: DeviceStepRequests, cu_rows_R1: Tensor, num_drafts_R: Tensor, num_rows: int
) -> DeviceStepRequests:
    """Return the requests with their first drafts, in a pass of `num_rows` rows."""
    return replace(
        drafted,
        cu_rows_R1=cu_rows_R1,
        num_drafts_R=num_drafts_R,
        first_chosen_R=cu_rows_R1[:-1],
        num_rows=num_rows,
    )


@triton.jit(
    do_not_specialize=["num_requests", "room", "most"],
    do_not_specialize_on_alignment=["margins_home", "new_num_drafts"],
)
def _trim_drafts(
    cu_rows, num_drafts, margins, weights, request_biases, biases, slopes, worths, kept_before, new_cu_rows,
    new_num_drafts, margins_home, num_requests, room, most,
    REQUESTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    for begin in range(0, num_requests, REQUESTS):
        requests = begin + tl.arange(0, REQUESTS)
        is_request = requests < num_requests
        first = tl.load(cu_rows + requests, mask=is_request, other=0)
        drafts = tl.load(num_drafts + requests, mask=is_request, other=0)
        has_rows = is_request & (tl.load(cu_rows + requests + 1, mask=is_request, other=0) > first)
        weight = tl.load(weights + requests, mask=is_request, other=0.0)
        request_bias = tl.load(request_biases + requests, mask=is_request, other=0.0)
        tl.store(worths + first, float("inf"), mask=has_rows)
        survival = tl.full([REQUESTS], 1.0, tl.float32)
        for k in range(most):
            is_draft = is_request & (k < drafts)
            margin = tl.load(margins + first + 1 + k, mask=is_draft, other=float("nan"))
            sure = tl.log(1 + tl.minimum(margin, _MAX_MARGIN))
            odds = request_bias + tl.load(biases + k) + tl.load(slopes + k) * sure
            chance = tl.where(margin >= 0, 1 / (1 + tl.exp(-odds)), 0.0)
            survival *= chance  # multiplied in order: rounding cannot make it rise
            tl.store(worths + first + 1 + k, weight * survival, mask=is_draft)
            tl.store(margins_home + requests * most + k, margin, mask=is_request)
    tl.debug_barrier()
    keep_most_valuable(
        cu_rows, worths, kept_before, new_cu_rows, new_num_drafts, num_requests, room, REQUESTS, PLACES
    )


@triton.jit
def keep_most_valuable(
    cu_rows, worths, kept_before, new_cu_rows, new_num_drafts, num_requests, room,
    REQUESTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Keep at most `room` rows, those of the greatest worths; negative ones are no rows."""
    places = tl.arange(0, PLACES)
    num_rows = tl.load(cu_rows + num_requests)
    is_row = places < num_rows
    worth = tl.load(worths + places, mask=is_row, other=-1.0)
    is_kept = (worth >= 0).to(tl.int32)
    if num_rows > room:
        order = worth.to(tl.int32, bitcast=True)  # non-negative floats order as their bits do
        minimum = 0
        for bit in range(31):  # bisects the greatest threshold that `room` rows reach
            higher = minimum | (1 << (30 - bit))
            minimum = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= room, higher, minimum)
        is_above, is_equal = order > minimum, (order == minimum) & (worth >= 0)
        missing = room - tl.sum(is_above.to(tl.int32), 0)
        is_kept = (is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= missing))).to(tl.int32)
    num_before = tl.cumsum(is_kept, 0) - is_kept
    tl.store(kept_before + places, num_before, mask=is_row)
    tl.store(kept_before + num_rows, tl.sum(is_kept, 0))
    tl.debug_barrier()

    tl.store(new_cu_rows, 0)
    for begin in range(0, num_requests, REQUESTS):
        requests = begin + tl.arange(0, REQUESTS)
        is_request = requests < num_requests
        first = tl.load(cu_rows + requests, mask=is_request, other=0)
        end = tl.load(cu_rows + requests + 1, mask=is_request, other=0)
        new_first = tl.load(kept_before + first, mask=is_request, other=0)
        new_end = tl.load(kept_before + end, mask=is_request, other=0)
        tl.store(new_cu_rows + requests + 1, new_end, mask=is_request)
        tl.store(new_num_drafts + requests, tl.maximum(new_end - new_first - 1, 0), mask=is_request)
