"""What a drafter keeps for one engine: its requests' states and the K/V pages of their context.

    begin: take in the plan ─▶ draft: propose ─▶ ... ─▶ take_in: append what stood, write context

A `HostSeat`'s steps are driven by the host, a `device_drafter.DeviceSeat`'s by the device. The drafter's
weights are nobody's seat: all seats of a process use the same. Made and called by `drafter_server.py`.

A seat may be newer than its engine's requests. Of those it knows neither tokens nor pages: what belongs to
them goes where nobody looks.

Legend: N rows of a pass, R requests, K most drafts, W = K + 1, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...cluster.errors import ConfigError
from ...cluster.made_up_plans import made_up_plan
from ...cluster.pages import pages_for
from ...cluster.plan import SchedulerOutput
from ...drafter.compute.backend import Backend
from ...drafter.dflash.model import DFlashDrafter
from ...drafter.dflash.propose import Proposer
from ...drafter.step.states import RequestStates
from ..targets.loading.memory import gpu_budget_bytes, page_bytes
from ..targets.loading.operators import make_drafter_backend, make_step_operators
from ..targets.loading.plan import LoadPlan
from ..targets.loading.rank import Checkpoints, lent_weights, pages_of, runs_on_device
from .mailbox import Kinds


class Seat(Protocol):
    """See the module's text. Plans come in order; two that are open have no request in common."""

    def begin(self, plan: SchedulerOutput) -> None:
        """Take in admissions and new pages."""
        ...

    def draft(self, plan: SchedulerOutput) -> tuple[Tensor, Tensor]:
        """Proposals, int64, as the target's side of the same kind expects them; and margins, fp32, of that
        shape."""
        ...

    def num_parts(self, plan: SchedulerOutput) -> int:
        """In how many parts the target tells how it went."""
        ...

    def told_kinds(self, plan: SchedulerOutput, part: int) -> Kinds:
        """Shapes and dtypes of what it tells in each, of a plan with the drafts that were verified."""
        ...

    def take_in(self, plan: SchedulerOutput, part: int, values: Sequence[Tensor], *, followed: bool) -> None:
        """Append what stood, and make context of the target's features."""
        ...


class LoadedDrafter:
    """A drafter beside copies of the target's embedding and head; makes seats.

    Args:
        plan: of an engine; others must be like it in what the weights depend on.

    Raises:
        CheckpointError, ConfigError: from loading.
    """

    @torch.inference_mode()
    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self._backend: Backend = make_drafter_backend(plan)
        self._drafter = Checkpoints().drafter(plan, lent_weights(plan, self._backend), self._backend)

    @property
    def device(self) -> torch.device:
        return self.plan.device

    @torch.inference_mode()
    def seat(self, plan: LoadPlan, num_pages: tuple[int, ...]) -> Seat:
        """For an engine with so many pages in each pool. ConfigError if there is no room for them."""
        mine = self.plan
        if (plan.pages.drafter, plan.dtype) != (mine.pages.drafter, mine.dtype) or (
            plan.max_model_len > mine.max_model_len
        ):
            raise ConfigError(
                "The shared drafter was loaded for engines with another max_model_len or dtype. Use the same "
                "for all engines that share it, or split the drafter.",
                param="speculative_config.placement",
            )
        _check_pages_fit(plan, num_pages)
        drafter = self._drafter
        assert isinstance(drafter, DFlashDrafter), "no other method has a process of its own"
        cache = drafter.new_cache(pages_of(plan.pages, plan.pages.drafter, num_pages), plan.page_size)
        if runs_on_device(plan):
            from .device_drafter import DeviceSeat

            return DeviceSeat(plan, drafter, cache, num_pages)
        operators = make_step_operators(plan)
        size = (plan.config.max_num_seqs, plan.max_model_len, num_pages, plan.page_size)
        states = RequestStates(*size, plan.device, self._backend.attention_batch, operators, plan.pages)
        return HostSeat(Proposer(drafter, cache, operators), states)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """A small step, to pay for first calls before an engine's drafts have to be in time."""
        plan, tokens = self.plan, 2
        groups = plan.pages.groups
        drafts = min(plan.num_speculative_tokens, plan.max_model_len - tokens - 1)
        if drafts < 1:
            return
        pages = pages_for(tokens + drafts + 1, plan.page_size)
        seat = self.seat(plan, (pages * len(groups),) * plan.pages.num_pools)
        prompt = np.zeros(tokens, np.int32)
        enters = made_up_plan([0], [tokens], [0], prompts=[prompt], num_pages=[pages], groups=groups)
        for step in (enters, made_up_plan([tokens], [drafts + 1], [drafts])):
            seat.begin(step)
            if step.num_draft_tokens:
                seat.draft(step)
            for part in range(seat.num_parts(step)):
                kinds = seat.told_kinds(step, part)
                values = [torch.ones(shape, dtype=dtype, device=self.device) for shape, dtype in kinds]
                seat.take_in(step, part, values, followed=True)


class HostSeat:
    """A seat whose steps the host drives."""

    def __init__(self, proposer: Proposer, states: RequestStates) -> None:
        self._proposer, self._states = proposer, states

    def begin(self, plan: SchedulerOutput) -> None:
        self._states.apply(plan)

    def draft(self, plan: SchedulerOutput) -> tuple[Tensor, Tensor]:
        """[R, K]."""
        proposals = self._proposer.propose(plan, self._states)
        assert proposals.margins_RK is not None, "a model knows how sure it is"
        return proposals.drafts_RK, proposals.margins_RK

    def num_parts(self, plan: SchedulerOutput) -> int:
        return 1

    def told_kinds(self, plan: SchedulerOutput, part: int) -> Kinds:
        """The tokens that came out [R, W] and how many [R], and features [N, H]."""
        drafter, width = self._proposer.drafter, 1 + int(plan.num_drafts.max(initial=0))
        count = plan.num_requests
        return [
            ((count, width), torch.int64),
            ((count,), torch.int64),
            ((plan.num_batched_tokens, drafter.config.hidden_size), drafter.dtype),
        ]

    def take_in(self, plan: SchedulerOutput, part: int, values: Sequence[Tensor], *, followed: bool) -> None:
        token_ids_RW, num_tokens_R, c_NH = values
        rows = self._states.lay_out_rows(plan)
        self._states.advance(plan, token_ids_RW, num_tokens_R)
        self._proposer.inject_features(c_NH, rows)


def _check_pages_fit(plan: LoadPlan, num_pages: tuple[int, ...]) -> None:
    """The target has chosen how many pages there are; the drafter's GPU must hold them beside its weights.

    A rank of a wide tensor-parallel target may hold less of a token than the drafter does.
    """
    if plan.device.type != "cuda":
        return
    needed = sum(count * size for count, size in zip(num_pages, page_bytes(plan, target=False), strict=True))
    room = gpu_budget_bytes(plan.device, plan.config.gpu_memory_utilization, step_bytes=0)
    if needed > room:
        fitting = max(num_pages[0] * room // needed, 0)
        raise ConfigError(
            f"The target's GPUs hold {num_pages[0]} K/V pages, the drafter's only {fitting} of them. Set "
            "num_pages to at most that.",
            param="num_pages",
        )
