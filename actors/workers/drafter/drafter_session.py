"""A drafter's session for one engine: its requests' states and the K/V pages of their context.

    begin: take in the plan ─▶ draft: propose ─▶ ... ─▶ take_in: append accepted tokens, write context

The host drives the steps of a `CpuDrafterSession`, the device those of a `GpuDrafterSession`. The drafter's
weights are shared by all sessions of a process. A session may be newer than its engine's requests: it has
neither tokens nor pages of those, and their values are written to unused memory.

Legend: N rows, R requests, K most drafts, W = K + 1, H hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ....cluster.errors import ConfigError
from ....cluster.hardware.memory_estimate import activation_bytes
from ....cluster.pages.kv_cache_groups import pages_for
from ....cluster.step.dummy_steps import dummy_step
from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.compute.backend import Backend
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.dflash.proposer import DFlashProposer
from ....drafter.step.request_states import RequestStates
from ...targets.loading.memory_budget import gpu_budget_bytes, page_bytes
from ...targets.loading.operator_factory import make_drafter_backend, make_step_operators
from ...targets.loading.rank_loader import Checkpoints, copy_embeddings, pages_of
from ...targets.loading.resolved_config import ResolvedConfig
from ...targets.loading.weight_report import WeightCounts, describe_weights
from ..shm.tensor_mailbox import Kinds

logger = logging.getLogger(__name__)


_GRAPHS_BYTES = 2**28  # of a session's some 400 CUDA graphs beside the memory that they share; an estimate


class DrafterSession(Protocol):
    """Plans come in order; two open plans have no request in common."""

    def begin(self, plan: SchedulerOutput) -> None:
        """Apply a plan's admissions and new pages."""
        ...

    def draft(self, plan: SchedulerOutput, *, has_grammars: bool = False) -> Sequence[Tensor]:
        """Return drafts or trees, margins and candidates, of the kinds that the target's side expects.

        `has_grammars`: see `DraftRequest`.
        """
        ...

    def num_parts(self, plan: SchedulerOutput) -> int:
        """Return the number of parts in which the target sends its results."""
        ...

    def result_kinds(self, plan: SchedulerOutput, part: int) -> Kinds:
        """Return a part's shapes and dtypes; `plan` has the numbers of verified drafts."""
        ...

    def take_in(self, plan: SchedulerOutput, part: int, values: Sequence[Tensor], *, followed: bool) -> None:
        """Append accepted tokens, and write context from the target's features."""
        ...


class LoadedDrafter:
    """A drafter with copies of the target's embedding and head; creates sessions.

    `resolved`: an engine's settings; others must have the same where the weights depend on them. Raises
    CheckpointError, ConfigError from loading.
    """

    @torch.inference_mode()
    def __init__(self, resolved: ResolvedConfig) -> None:
        self.resolved = resolved
        self._backend: Backend = make_drafter_backend(resolved)
        self._drafter = Checkpoints().drafter(
            resolved, copy_embeddings(resolved, self._backend), self._backend
        )
        for sentence in describe_weights(resolved, {"drafter": WeightCounts.of(self._backend)}):
            logger.info("%s", sentence)

    @property
    def device(self) -> torch.device:
        return self.resolved.device

    @torch.inference_mode()
    def make_session(self, resolved: ResolvedConfig, num_pages: tuple[int, ...]) -> DrafterSession:
        """Create a session for these pages per pool. Raises ConfigError if they do not fit."""
        own = self.resolved
        layout = resolved.pages.drafter, resolved.dtype, resolved.kv_dtype
        if layout != (own.pages.drafter, own.dtype, own.kv_dtype) or (
            resolved.max_model_len > own.max_model_len
        ):
            raise ConfigError(
                "The shared drafter was loaded for engines with another max_model_len, dtype or "
                "kv_cache_dtype. Use the same for all engines that share it, or split the drafter.",
                param="speculative_config.placement",
            )
        _check_pages_fit(resolved, num_pages)
        drafter = self._drafter
        assert isinstance(drafter, DFlashDrafter), "only DFlash drafters can be split off"
        count = pages_of(resolved.pages, resolved.pages.drafter, num_pages)
        cache = drafter.new_cache(count, resolved.page_size, resolved.kv_dtype)
        if resolved.runs_on_device:
            from .gpu_drafter_session import GpuDrafterSession

            return GpuDrafterSession(resolved, drafter, cache, num_pages)
        operators = make_step_operators(resolved)
        state_args = (resolved.config.max_num_seqs, resolved.max_model_len, num_pages, resolved.page_size)
        states = RequestStates(
            *state_args, resolved.device, self._backend.attention_batch, operators, resolved.pages
        )
        return CpuDrafterSession(DFlashProposer(drafter, cache, operators), states)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a small step, to pay for slow first calls before an engine needs drafts in time."""
        resolved, tokens = self.resolved, 2
        groups = resolved.pages.groups
        drafts = min(resolved.num_speculative_tokens, resolved.max_model_len - tokens - 1)
        if drafts < 1:
            return
        pages = pages_for(tokens + drafts + 1, resolved.page_size)
        session = self.make_session(resolved, (pages * len(groups),) * resolved.pages.num_pools)
        prompt = np.zeros(tokens, np.int32)
        prefill = dummy_step([0], [tokens], [0], prompts=[prompt], num_pages=[pages], groups=groups)
        for step in (prefill, dummy_step([tokens], [drafts + 1], [drafts])):
            session.begin(step)
            if step.num_draft_tokens:
                session.draft(step)
            for part in range(session.num_parts(step)):
                kinds = session.result_kinds(step, part)
                values = [torch.ones(shape, dtype=dtype, device=self.device) for shape, dtype in kinds]
                session.take_in(step, part, values, followed=True)


class CpuDrafterSession:
    def __init__(self, proposer: DFlashProposer, states: RequestStates) -> None:
        self._proposer, self._states = proposer, states

    def begin(self, plan: SchedulerOutput) -> None:
        self._states.apply(plan)

    def draft(self, plan: SchedulerOutput, *, has_grammars: bool = False) -> Sequence[Tensor]:
        """Return tensors of `draft_kinds`, with or without grammars, as the target's host grows trees."""
        proposals = self._proposer.propose(plan, self._states)
        assert proposals.margins_RK is not None, "DFlash drafters give margins"
        candidates = [values for each in proposals.candidates for values in (each.ids_XC, each.scores_XPC)]
        return proposals.drafts_RK, proposals.margins_RK, *candidates

    def num_parts(self, plan: SchedulerOutput) -> int:
        return 1

    def result_kinds(self, plan: SchedulerOutput, part: int) -> Kinds:
        """Return the kinds of the new tokens [R, W], their numbers [R], and features [N, H]."""
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


def _check_pages_fit(resolved: ResolvedConfig, num_pages: tuple[int, ...]) -> None:
    """Raise ConfigError unless the drafter's GPU holds the target's pages and a session's steps."""
    if resolved.device.type != "cuda":
        return
    needed = sum(
        count * size for count, size in zip(num_pages, page_bytes(resolved, target=False), strict=True)
    )
    budget = gpu_budget_bytes(resolved.device, resolved.config.gpu_memory_utilization, _step_bytes(resolved))
    if needed > budget:
        fitting = max(num_pages[0] * budget // needed, 0)
        raise ConfigError(
            f"The target's GPUs hold {num_pages[0]} K/V pages, the drafter's only {fitting} of them. Set "
            "num_pages to at most that.",
            param="num_pages",
        )


def _step_bytes(resolved: ResolvedConfig) -> int:
    """Return the estimated bytes of a session's largest passes, and of its graphs.

    Graphs are captured as they are needed, while other sessions run, so nothing can be measured before.
    """
    drafter, rows = resolved.drafter, resolved.max_num_batched_tokens
    assert isinstance(drafter, DrafterConfig), "only DFlash drafters can be split off"
    drafted = min(resolved.config.max_num_seqs * (1 + resolved.num_speculative_tokens), rows)
    sizes = {"hidden": drafter.hidden_size, "inter": drafter.intermediate_size}
    sizes |= {"vocab": resolved.target.vocab_size, "itemsize": resolved.dtype.itemsize}
    return _GRAPHS_BYTES + activation_bytes(rows, drafted, **sizes)
