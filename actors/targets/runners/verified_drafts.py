"""The drafts that a host-driven step verifies: chains, or trees that branch.

    chains  a ─ b ─ c                 rows in a line; the longest right start is accepted
    trees   a ─ b ─ c                 rows see their own path; the accepted path's K and V are moved to the
            └─ d                      slots of its positions, and it alone is the drafter's context

Created and called by `cpu_runner.py`; on a device by `step_passes.py` and `drafts/device_trees.py`.

Legend: R requests, N rows, X sampled rows, K most drafts, W = K + 1, m taps, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ....cluster.request.logprobs import StepLogprobs
from ....cluster.step.scheduler_output import SchedulerOutput, TreeGain, TreeOutcome
from ....drafter.step.inputs.draft_trees import AcceptedPaths, DraftTrees
from ....drafter.step.inputs.row_layout import Ints, StepRows
from ....drafter.step.sampling.step_ops import StepOperators


class MoveRows(Protocol):
    """Moves K and V of a step's rows to the slots of other rows of it."""

    def __call__(self, rows: StepRows, sources: Ints, targets: Ints) -> None: ...


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens that a step committed.

    Attributes:
        token_ids_RW: int64, new tokens, then -1.
        num_tokens_R: int64, new tokens.
        learned: what the accepted paths of trees teach.
    """

    token_ids_RW: Tensor
    num_tokens_R: Tensor
    learned: TreeOutcome | None

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """The new tokens, and how many each request has."""
        return self.token_ids_RW, self.num_tokens_R

    def logprobs(self, of_rows: StepLogprobs | None) -> StepLogprobs | None:
        """Return the log probabilities of the new tokens, given those of all sampled rows."""
        return of_rows

    def context(self, taps_NmH: Tensor | None, rows: StepRows) -> tuple[Tensor | None, StepRows]:
        """Return the taps and rows that belong to the drafter's context."""
        return taps_NmH, rows


@dataclass(frozen=True, slots=True)
class Chains:
    """Drafts without branches.

    Attributes:
        plan: the step's, with the numbers of drafts that are verified.
        tokens_RK: int64; after a request's last draft they are arbitrary.
        gain: what trees would have gained, or did, if the plan grew them.
    """

    plan: SchedulerOutput
    tokens_RK: Tensor
    gain: TreeGain | None = None

    @property
    def trees(self) -> DraftTrees | None:
        return None

    def accept(self, chosen_X: Tensor, rows: StepRows, operators: StepOperators, move: MoveRows) -> Accepted:
        """Return what is accepted of the drafts, given the target's tokens."""
        return Accepted(*operators.accept(chosen_X, rows.counts_R, self.tokens_RK), learned=None)


@dataclass(frozen=True, slots=True)
class Trees:
    """Drafts of which some branch. Attributes: see `Chains`."""

    plan: SchedulerOutput
    tokens_RK: Tensor
    gain: TreeGain | None
    trees: DraftTrees

    def accept(self, chosen_X: Tensor, rows: StepRows, operators: StepOperators, move: MoveRows) -> Accepted:
        assert self.plan.tree is not None, "trees were not planned"
        paths = self.trees.accept(chosen_X.cpu().numpy(), rows.counts_R.cpu().numpy())
        move(rows, *paths.moves(rows.num_rows_R))
        tokens_RW, num_tokens_R = (
            torch.from_numpy(each).to(chosen_X.device) for each in (paths.token_ids_RW, paths.num_tokens_R)
        )
        learned = self.trees.outcome(paths, self.plan.tree.width)
        return AcceptedOfTrees(tokens_RW, num_tokens_R, learned, paths, self.trees)


@dataclass(frozen=True, slots=True)
class AcceptedOfTrees(Accepted):
    """The accepted paths of trees."""

    paths: AcceptedPaths
    trees: DraftTrees

    def logprobs(self, of_rows: StepLogprobs | None) -> StepLogprobs | None:
        return None if of_rows is None else self.paths.logprobs_of(of_rows)

    def context(self, taps_NmH: Tensor | None, rows: StepRows) -> tuple[Tensor | None, StepRows]:
        """Return taps and rows as in a step that verified the accepted paths alone."""
        assert taps_NmH is not None, "a target with a drafter has taps"
        is_tree_R = self.trees.branches()
        placed = self.paths.context_rows(rows.num_rows_R, is_tree_R)
        sources, targets = (torch.from_numpy(each).to(taps_NmH.device) for each in placed)
        counts_R = rows.counts_R.cpu().numpy()
        kept_R = torch.from_numpy(np.where(is_tree_R, self.paths.num_tokens_R, counts_R))
        slots = tuple(slots_N[targets] for slots_N in rows.kv_slots)
        kept_R = kept_R.to(rows.counts_R.device)
        kept = replace(rows, positions_N=rows.positions_N[sources], kv_slots=slots, counts_R=kept_R)
        return taps_NmH[sources], kept
