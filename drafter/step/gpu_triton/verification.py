"""Triton version of `drafter/step/sampling/verification.py` and of `RequestStates.advance`.

One launch; the host reads nothing, so it can be captured in a CUDA graph. Called by
`actors/targets/runners/target_pass.py`.

Legend: R requests of a step, X sampled rows, W = 1 + most drafts.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .inputs.row_layout import DeviceStepRequests, SlotTables

_WARP = 32


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
    _accept_and_advance[num_requests,](
        chosen_X,
        requests.first_chosen_R,
        requests.slots_R,
        requests.cu_rows_R1,
        requests.num_drafts_R,
        requests.samples_R,
        tables.token_ids,
        tables.num_computed,
        outcome_RW1,
        tables.token_ids.stride(0),
        width,
        LANES=max(_WARP, triton.next_power_of_2(width)),
        num_warps=1,  # one warp reads all drafts before it overwrites them
    )


# After trimming, `num_drafts` is a view into the outcome with any alignment.
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["num_drafts"])
def _accept_and_advance(
    chosen,
    first_chosen,
    slots,
    cu_rows,
    num_drafts,
    samples,
    token_ids,
    num_computed,
    outcome,
    token_stride,
    width,
    LANES: tl.constexpr,
):
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
    behind = token_ids + slot.to(tl.int64) * token_stride + num_known
    is_judged = is_sampled & (lanes <= drafts)
    verdict = tl.load(
        chosen + tl.load(first_chosen + request, mask=is_sampled, other=0) + lanes, mask=is_judged, other=-1
    )
    draft = tl.load(behind + lanes, mask=lanes < drafts, other=-1)
    stands = (lanes < drafts) & (draft == verdict)
    num_accepted = tl.min(
        tl.where(stands, LANES, lanes), 0
    )  # the first mismatch; lane `drafts` always is one
    is_new = is_judged & (lanes <= num_accepted)
    tl.store(behind + lanes, tl.maximum(verdict, 0), mask=is_new)  # NOT_A_NUMBER cannot be an input token
    tl.store(num_computed + slot, num_known + tl.where(is_sampled, num_accepted, 0))
    tl.store(outcome + lanes, tl.where(is_new, verdict, -1).to(tl.int32), mask=lanes < width)
    tl.store(outcome + width, tl.where(is_sampled, num_accepted + 1, 0))
