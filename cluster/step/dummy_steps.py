"""Dummy plans that no scheduler made, for warm-up, memory measurements and timing.

Request i is in slot i, with state i, greedy by default. Running such a plan overwrites these slots, pages and
states. Used by `actors/targets/loading/warmup.py` and `jobs/bench/step_cost.py`.

Shape legend: as in `scheduler_output.py`; R requests, M new page-table entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pages.kv_cache_groups import KVCacheGroup, count_pools
from .scheduler_output import AdmittedRequest, IntArray, SchedulerOutput, SlotSampling, StateEntry, Trim

GREEDY = SlotSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_length=0, stop_token_ids=())


def dummy_step(
    num_computed: Sequence[int],
    num_rows: Sequence[int],
    num_drafts: Sequence[int],
    *,
    prompts: Sequence[IntArray] = (),
    num_pages: Sequence[int] | None = None,
    groups: Sequence[KVCacheGroup] = (KVCacheGroup(),),
    page_order: IntArray | None = None,
    sampling: SlotSampling = GREEDY,
) -> SchedulerOutput:
    """Return a step of requests 0 to R - 1, which all sample.

    `num_computed`, `num_rows` and `num_drafts` are as in the plan. Requests with `prompts` (token ids) enter
    in this step; each gets `num_pages` new pages in every group, taken in `page_order` (0, 1, .. if absent).
    """
    slots = np.arange(len(num_rows), dtype=np.int32)
    admitted = [
        AdmittedRequest(i, f"made-up-{i}", ids, sampling, StateEntry(i, None, computed))
        for i, (ids, computed) in enumerate(zip(prompts, num_computed, strict=False))
    ]
    entry_groups, owners, indices, ids = _entries(groups, num_pages or [0] * len(slots))
    return SchedulerOutput(
        step=0,
        admitted=tuple(admitted),
        page_groups=entry_groups,
        page_slots=owners,
        page_indices=indices,
        page_ids=ids if page_order is None else page_order[ids],
        slots=slots,
        num_computed=np.array(num_computed, np.int32),
        num_rows=np.array(num_rows, np.int32),
        num_drafts=np.array(num_drafts, np.int32),
        samples=np.ones(len(slots), np.bool_),
    )


def dummy_trim(plan: SchedulerOutput) -> Trim:
    ones_K, ones_R = (np.ones(n, np.float32) for n in (int(plan.num_drafts.max()), plan.num_requests))
    return Trim(ones_K, ones_K, ones_R, ones_R, ones_K[:0], num_rows=plan.num_batched_tokens)


def _entries(groups: Sequence[KVCacheGroup], counts: Sequence[int]) -> IntArray:
    """Return [4, M]: group, slot, index and id of `counts` pages per slot; ids ascend within a pool."""
    used = [0] * count_pools(groups)
    entries: list[tuple[int, int, int, int]] = []
    for number, group in enumerate(groups):
        for slot, count in enumerate(counts):
            entries += [(number, slot, i, used[group.pool] + i) for i in range(count)]
            used[group.pool] += count
    return np.array(entries, dtype=np.int32).reshape(-1, 4).T.copy()
