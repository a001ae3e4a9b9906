"""Suffix decoding where the device drives steps: copies are made on the host and go up with the plan.

The host mirrors the requests' tokens from the results, so a step is planned after the last one has ended.
What the device gets are drafts as changes of its token table, and their margins. Used by `gpu_runner.py`.

Legend: R requests of a step, G its decoding ones, K most drafts, M drafts, N rows of their blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ....cluster.step.scheduler_output import IntArray, SchedulerOutput
from ....drafter.step.inputs.row_layout import Ints
from ....drafter.suffix.proposer import SuffixProposer

Indices = NDArray[np.integer]


class Copies(NamedTuple):
    """Drafts by slot and position, int [M], and margins by row of the decoding requests' blocks, fp32 [N].

    A request without a copy drafts token 0 with margin 0, which is verified like any draft.
    """

    slots_M: Indices
    positions_M: Indices
    tokens_M: Indices
    margins_N: NDArray[np.float32]


class TokenMirror:
    """The known tokens of the running requests by slot, as `SuffixProposer` reads them."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def admit(self, plan: SchedulerOutput) -> None:
        for request in plan.admitted:
            self._tokens[request.slot] = request.token_ids.tolist()

    def append(self, plan: SchedulerOutput, token_ids_RW: IntArray, num_tokens_R: IntArray) -> None:
        """Add the tokens that a step produced."""
        for slot, tokens, count in zip(
            plan.slots.tolist(), token_ids_RW.tolist(), num_tokens_R.tolist(), strict=True
        ):
            self._tokens.setdefault(slot, []).extend(tokens[:count])

    def has(self, slots_R: IntArray) -> bool:
        """Return whether all slots had a request; in dummy steps they may not."""
        return all(slot in self._tokens for slot in slots_R.tolist())

    def num_known(self, plan: SchedulerOutput) -> Ints:
        return np.array([len(self._tokens.get(slot, ())) for slot in plan.slots.tolist()], dtype=np.int64)

    def known_tokens(self, slot: int, begin: int, end: int) -> list[int]:
        return self._tokens[slot][begin:end]


class DeviceSuffixes:
    """Makes the copies of each plan. `num_rows`: most rows of the decoding requests' blocks."""

    def __init__(self, proposer: SuffixProposer, num_rows: int) -> None:
        self._proposer, self._mirror = proposer, TokenMirror()
        self.num_rows = num_rows

    def copy(self, plan: SchedulerOutput, decoding_G: NDArray[np.intp]) -> Copies:
        """Return the copies of a plan, whose earlier steps have all ended."""
        self._mirror.admit(plan)
        margins_N = np.zeros(self.num_rows, dtype=np.float32)
        drafting_R = plan.slots[plan.num_drafts > 0]
        if not self._mirror.has(drafting_R):
            empty = np.zeros(0, dtype=np.int64)
            return Copies(empty, empty, empty, margins_N)
        found = self._proposer.propose(plan, self._mirror)
        counts_G = plan.num_drafts[decoding_G]
        requests_M = np.repeat(decoding_G, counts_G)
        places_M = np.arange(len(requests_M)) - np.repeat(np.cumsum(counts_G) - counts_G, counts_G)
        if not len(requests_M):
            return Copies(requests_M, requests_M, requests_M, margins_N)
        assert found.margins_RK is not None, "suffix drafts have margins"
        rows_M = np.repeat(np.cumsum(counts_G + 1) - counts_G, counts_G) + places_M
        tokens_M = found.drafts_RK.numpy()[requests_M, places_M]
        margins_N[rows_M] = np.nan_to_num(found.margins_RK.numpy()[requests_M, places_M])
        positions_M = self._mirror.num_known(plan)[requests_M] + places_M
        return Copies(plan.slots[requests_M], positions_M, np.maximum(tokens_M, 0), margins_N)

    def append(self, plan: SchedulerOutput, token_ids_RW: IntArray, num_tokens_R: IntArray) -> None:
        self._mirror.append(plan, token_ids_RW, num_tokens_R)
