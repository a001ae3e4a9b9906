"""Triton version of `../sampling/ngram_lookup.py`: prompt look-up in one launch; the host reads nothing.

Each program scans its request's tokens backward in chunks and stops at a run of the greatest length. It
writes the drafts after the known tokens, where `lay_out_rows` reads them. A pass has rows for all planned
drafts, found or not; where nothing is found they hold token 0, which is verified like any draft. Called by
`actors/targets/runners/step_passes.py`.

Legend: R requests.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from .inputs.row_layout import DeviceStepRequests, SlotTables

_PLACES = 1024  # scanned per iteration


def look_up(requests: DeviceStepRequests, tables: SlotTables, shortest: int, longest: int) -> None:
    """Write drafts for requests with only their newest token to compute.

    Args:
        shortest, longest: lengths of the token runs to match.
    """
    _look_up[len(requests.slots_R),](
        requests.slots_R, requests.num_drafts_R, tables.token_ids, tables.num_computed,
        tables.token_ids.stride(0), shortest, longest,
        PLACES=_PLACES, LANES=triton.next_power_of_2(requests.max_drafts),
    )  # fmt: skip


@triton.jit(do_not_specialize=["shortest", "longest"])
def _look_up(
    slots, num_drafts, token_ids, num_computed, token_stride, shortest, longest,
    PLACES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    drafts = tl.load(num_drafts + request)
    if drafts == 0:
        return
    slot = tl.load(slots + request)
    tokens = token_ids + slot.to(tl.int64) * token_stride
    end = tl.load(num_computed + slot) + 1  # known tokens
    best, begin, last = shortest - 1, end, end - 2
    while (last >= 0) & (best < longest):
        places = last - tl.arange(0, PLACES)  # end of a candidate run
        length = tl.zeros([PLACES], tl.int32)
        goes_on = places >= 0
        for n in range(longest):
            goes_on = goes_on & (places >= n)
            mine = tl.load(tokens + (end - 1 - n), mask=n < end, other=-1)
            goes_on = goes_on & (tl.load(tokens + places - n, mask=goes_on, other=-2) == mine)
            length += goes_on.to(tl.int32)
        found = tl.max(length, 0)
        after = tl.max(tl.where(length == found, places, -1), 0) + 1  # last occurrence of the longest
        begin = tl.where(found > best, after, begin)
        best = tl.maximum(found, best)
        last -= PLACES
    lanes = tl.arange(0, LANES)
    is_draft = lanes < drafts
    place = begin + lanes % tl.maximum(end - begin, 1)  # a copy that reaches the end continues with itself
    token = tl.load(tokens + place, mask=is_draft & (begin < end), other=0)
    tl.store(tokens + end + lanes, token, mask=is_draft)
