"""Recomputes running requests for a new drafter, which lacks the K and V of their earlier tokens.

Requests admitted later provide the new drafter's whole context. Running ones decode without drafts until the
target has computed all their tokens again: such a request is preempted and readmitted. This makes the steps
of other requests longer, and its own reader waits until it is done. Therefore

* one request is recomputed at a time, the shortest first;
* its step has no more rows than if all requests drafted, because the rows of the missing drafts are free; if
  few are missing, up to a quarter more;
* a request that is too long, or about to end, continues without drafts. A recomputed row costs about a tenth
  of a plain token on a CPU and a hundredth on a GPU, because a chunk reads the weights once, and drafts save
  about half of each remaining token. The number of remaining tokens is unknown and assumed to be the number
  generated so far.

Outputs do not depend on it. Does not access pages: `drafter_context.py`, its owner, preempts and checks for
room.

Legend: L running sequences of one kind (online, background) without drafter context.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..step.scheduler_output import IntArray
from ..step.sequence import WAITING, Sequence, SlotTable

_MIN_ROWS = 16  # per step
_MAX_MORE = 1 / 4  # fraction of the rows of a step in which all draft
_MAX_STEPS = 64  # for one sequence, whose reader waits meanwhile
_ROWS_PER_TOKEN = 8  # maximum rows recomputed for each remaining token
_MIN_REMAINING = 128  # expected tokens of a request that has just begun


class DrafterContextRefill:
    """Chooses the requests to recompute, and their rows per step.

    Args:
        max_rows: maximum rows of a step.
        chunks: whether a prompt may be computed in parts.

    Attributes:
        current: the sequence that is being recomputed.
    """

    def __init__(self, max_rows: int, *, chunks: bool) -> None:
        self._max_rows, self._chunks = max_rows, chunks
        # Prompt tokens by slot, of online and of background requests running without drafter context.
        self._prompts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._min_rows = _MIN_ROWS
        self.current: Sequence | None = None

    def begin(self, running: Iterable[Sequence], num_tokens: int = 0) -> None:
        """Start recomputing these, which lack drafter context; none up to `num_tokens` is too long."""
        self._prompts, self.current = ({}, {}), None
        self._min_rows = max(_MIN_ROWS, -(-num_tokens // _MAX_STEPS))
        for sequence in running:
            request = sequence.request
            if request.max_draft_tokens != 0:
                self._prompts[request.background][sequence.slot] = len(request.prompt_token_ids)

    def leave(self, slot: int) -> None:
        """Forget the sequence of this slot, which has left; the next one in it has drafter context."""
        for prompts in self._prompts:
            prompts.pop(slot, None)

    def rows(self, num_drafts: int, num_others: int) -> int:
        """Return the maximum rows of the recomputed sequence in a step.

        Args:
            num_drafts: draft length if all drafted.
            num_others: other requests with rows in the step.
        """
        return self._spare_rows(num_drafts, num_others) if self._chunks else self._max_rows

    def next(
        self, table: SlotTable, num_drafts: int, num_others: int, *, background: bool
    ) -> Sequence | None:
        """Return the next sequence to recompute; None while one is in progress, or if it pays for none.

        Args:
            num_drafts, num_others: as in `rows`.
            background: kind of the sequence.
        """
        if self.current is not None and not _is_in_progress(self.current, table):
            self.current = None
        rows_left = self._max_rows - (1 + num_others) * (1 + num_drafts)
        prompts = self._prompts[background]
        if self.current is not None or not prompts or not num_drafts or rows_left <= 0:
            return None
        slots_L = np.fromiter(prompts, np.int32, len(prompts))
        slots_L = slots_L[table.go_on(slots_L)]
        tokens_L = table.num_tokens_S[slots_L]
        most = self._spare_rows(num_drafts, num_others) * (_MAX_STEPS if self._chunks else 1)
        pays_L = tokens_L <= np.minimum(_ROWS_PER_TOKEN * _remaining(table, slots_L, prompts), most)
        if not pays_L.any():
            return None
        return table.sequences[int(slots_L[pays_L][tokens_L[pays_L].argmin()])]

    def _spare_rows(self, num_drafts: int, num_others: int) -> int:
        if not num_others:
            return self._max_rows
        num_missing, num_more = num_drafts * sum(map(len, self._prompts)), num_others * (1 + num_drafts)
        return min(max(num_missing, int(num_more * _MAX_MORE), self._min_rows), self._max_rows)


def _is_in_progress(sequence: Sequence, table: SlotTable) -> bool:
    """Return whether it is running and lacks more than its newest token."""
    return sequence.slot != WAITING and int(table.known_rows(np.array([sequence.slot]))[0]) > 1


def _remaining(table: SlotTable, slots_L: IntArray, prompts: dict[int, int]) -> IntArray:
    """Return the number of tokens that each sequence is expected to generate."""
    prompts_L = np.array([prompts[slot] for slot in slots_L.tolist()], dtype=np.int32)
    tokens_L = table.num_tokens_S[slots_L]
    expected_L = np.maximum(tokens_L - prompts_L, _MIN_REMAINING)
    return np.minimum(expected_L, table.max_length_S[slots_L] - tokens_L)
