"""Suffix decoding where the device drives steps: the host makes copies, alone or beside a drafter.

The host mirrors the requests' tokens from the results, so a step is planned after the last one has ended.
What the device gets are drafts as changes of its token table, and their margins. Used by `gpu_runner.py`;
to its passes, copies alone are the source `HostCopies`.

    copies alone           go up with the plan
    instead of a pass      likewise, and the drafter's pass is left out
    mixed                  draft ─▶ [wait: drafts, margins ─▶ host] ─▶ chosen copies ─▶ trim, verify ..

Of several ranks the first one's choices are broadcast: estimates may differ in their last digits.

Legend: R requests of a step, G its decoding ones, K most drafts, M drafts, N rows of their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .....cluster.step.scheduler_output import BoolArray, IntArray, SchedulerOutput
from .....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests
from .....drafter.step.inputs.proposals import Proposals
from .....drafter.step.inputs.row_layout import Ints
from .....drafter.suffix.mixing import SuffixMixer
from .....drafter.suffix.proposer import SuffixProposer
from ...model.tensor_parallel import Communicator
from .colocated_drafter import broadcast_proposals
from .device_trees import StepTrees
from .draft_source import DeviceDrafts, StepMemory

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


class _DraftPlaces(NamedTuple):
    """A step's planned drafts: request and number of each, slot and position, and row in the blocks."""

    requests_M: Indices
    columns_M: Indices
    slots_M: Indices
    positions_M: Indices
    rows_M: Indices

    @classmethod
    def of(cls, plan: SchedulerOutput, decoding_G: Indices, num_known_R: Ints) -> _DraftPlaces:
        counts_G = plan.num_drafts[decoding_G].astype(np.int64)
        requests_M = np.repeat(decoding_G, counts_G)
        columns_M = np.arange(len(requests_M)) - np.repeat(np.cumsum(counts_G) - counts_G, counts_G)
        rows_M = np.repeat(np.cumsum(counts_G + 1) - counts_G, counts_G) + columns_M
        positions_M = num_known_R[requests_M] + columns_M
        return cls(requests_M, columns_M, plan.slots[requests_M], positions_M, rows_M)


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """Which drafts of a step are copies.

    Attributes:
        is_copied_R, is_pass_skipped: beside a drafter's drafts, as in `StepResult`.
        is_missing_RK: planned drafts that a copy is too short for (`Copies`); None without copies.
    """

    is_copied_R: BoolArray | None = None
    is_pass_skipped: bool = False
    is_missing_RK: BoolArray | None = None

    @property
    def is_made(self) -> bool:
        """Whether copies compete with a drafter's drafts in this step."""
        return self.is_copied_R is not None

    def drop_missing(self, margins_RK: NDArray[np.float32]) -> None:
        """Mark what a copy was too short for as no draft, of which nothing can be learned."""
        if self.is_missing_RK is not None:
            margins_RK[self.is_missing_RK] = np.nan


class HostCopies(DeviceDrafts):
    """Drafts that the host has written; `margins_N`: theirs, fp32, uploaded with the plan."""

    def __init__(self, margins_N: Tensor, memory: StepMemory) -> None:
        self._margins_N, self._memory = margins_N, memory

    def propose(self, requests: DeviceStepRequests, trees: StepTrees | None, *, filters: bool) -> None:
        count = requests.num_rows
        self._memory.workspace.margins_N[:count].copy_(self._margins_N[:count])


class NoSuffixes:
    """Makes no copies; the base class of `DeviceSuffixes`.

    Attributes:
        num_rows: most rows of the decoding requests' blocks; the plan is uploaded with their margins.
        choice: of the current plan.
    """

    num_rows = 0

    def __init__(self) -> None:
        self.choice = CopyChoice()

    def copy(self, plan: SchedulerOutput, decoding_G: Indices) -> Copies:
        """Return the copies of a plan; none if the drafter has a pass. All earlier steps must have ended."""
        return self._no_copies()

    def mix(
        self, plan: SchedulerOutput, decoding_G: Indices, token_ids: Tensor, margins_N: Tensor
    ) -> Copies | None:
        """Wait for the drafter's pass and return the chosen drafts; None if the device has them already.

        Args:
            token_ids: the device's tokens by slot and position, with the drafts.
            margins_N: the device's margins of the blocks' rows.
        """
        return None

    def append(self, plan: SchedulerOutput, token_ids_RW: IntArray, num_tokens_R: IntArray) -> None:
        """Learn the tokens that a step produced."""

    def on_drafter_replaced(self) -> None: ...

    def _no_copies(self) -> Copies:
        none = np.zeros(0, dtype=np.int64)
        return Copies(none, none, none, np.zeros(self.num_rows, dtype=np.float32))


NO_SUFFIXES = NoSuffixes()


class DeviceSuffixes(NoSuffixes):
    """Makes the copies of each plan.

    Args:
        mixer: chooses between the drafter's drafts and copies; None where copies are all that is drafted.
        device: of the communicator's tensors.
    """

    def __init__(
        self,
        proposer: SuffixProposer,
        mixer: SuffixMixer | None,
        num_rows: int,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._proposer, self._mixer, self._mirror = proposer, mixer, TokenMirror()
        self._communicator, self._device = communicator, device
        self._is_sharded = communicator.world_size > 1
        self.num_rows = num_rows

    def copy(self, plan: SchedulerOutput, decoding_G: Indices) -> Copies:
        self._mirror.admit(plan)
        self.choice, none = CopyChoice(), self._no_copies()
        if not self._mirror.has(plan.slots[plan.num_drafts > 0]):
            return none
        if self._mixer is None:
            return self._placed(self._proposer.propose(plan, self._mirror), plan, decoding_G)
        skips = self._mixer.copy(plan, self._mirror)
        if not plan.num_draft_tokens:
            return none
        if self._is_sharded:
            skips = bool(self._communicator.broadcast(torch.tensor([int(skips)], device=self._device)))
        self.choice = CopyChoice(np.zeros(plan.num_requests, dtype=np.bool_), skips)
        return self._mixed(None, plan, decoding_G) if skips else none

    def mix(
        self, plan: SchedulerOutput, decoding_G: Indices, token_ids: Tensor, margins_N: Tensor
    ) -> Copies | None:
        places = _DraftPlaces.of(plan, decoding_G, self._mirror.num_known(plan))
        slots_M, positions_M, rows_M = (
            torch.from_numpy(each).to(token_ids.device)
            for each in (places.slots_M.astype(np.int64), places.positions_M, places.rows_M)
        )
        found_2M = torch.stack((token_ids[slots_M, positions_M], margins_N[rows_M].view(torch.int32))).cpu()
        shape = plan.num_requests, int(plan.num_drafts.max())
        drafts_RK = torch.full(shape, -1, dtype=torch.int64)
        margins_RK = torch.full(shape, float("nan"))
        drafts_RK[places.requests_M, places.columns_M] = found_2M[0].long()
        margins_RK[places.requests_M, places.columns_M] = found_2M[1].view(torch.float32)
        copies = self._mixed(Proposals(drafts_RK, margins_RK), plan, decoding_G)
        is_copied_R = self.choice.is_copied_R
        return copies if self._is_sharded or (is_copied_R is not None and is_copied_R.any()) else None

    def append(self, plan: SchedulerOutput, token_ids_RW: IntArray, num_tokens_R: IntArray) -> None:
        self._mirror.append(plan, token_ids_RW, num_tokens_R)

    def on_drafter_replaced(self) -> None:
        if self._mixer is not None:
            self._mixer.on_drafter_replaced()

    def _mixed(self, drafted: Proposals | None, plan: SchedulerOutput, decoding_G: Indices) -> Copies:
        assert self._mixer is not None, "only a mixer mixes"
        found = self._mixer.mix(drafted, plan, self._mirror.device)
        self.choice = CopyChoice(found.is_copied_R, found.is_pass_skipped)
        if self._is_sharded:
            found = broadcast_proposals(found.to(self._device), self._communicator).to(self._mirror.device)
        return self._placed(found, plan, decoding_G)

    def _placed(self, found: Proposals, plan: SchedulerOutput, decoding_G: Indices) -> Copies:
        places = _DraftPlaces.of(plan, decoding_G, self._mirror.num_known(plan))
        copies = self._no_copies()
        if not len(places.slots_M):
            return copies
        assert found.margins_RK is not None, "suffix drafts have margins"
        self.choice = replace(self.choice, is_missing_RK=found.drafts_RK.numpy() < 0)
        tokens_M = found.drafts_RK.numpy()[places.requests_M, places.columns_M]
        margins_M = found.margins_RK.numpy()[places.requests_M, places.columns_M]
        copies.margins_N[places.rows_M] = np.nan_to_num(margins_M)
        return Copies(places.slots_M, places.positions_M, np.maximum(tokens_M, 0), copies.margins_N)
