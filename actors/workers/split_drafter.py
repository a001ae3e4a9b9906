"""A drafter split off from the target: both halves of the conversation that a step then is.

A step as both sides see it, driven by the host (groups: `process_group.py`):

    target ranks (RemoteDrafts)                      drafter (HostDrafter)
    apply the plan                                   apply the plan
                        ◀── joint: drafts [R, K] ─── propose
    verify
    rank 0: fc + norm   ─── link: tokens, counts ──▶ append
                        ─── link: features [N, H] ─▶ write context into its pages

Driven by the device (`device_drafter.py`) drafts are a token per row of the blocks, [N], and what comes back
are the target's choices [X]: the drafter judges its drafts by them as the target does.

All sizes follow from the plan, which everybody has, so nothing else is said. Features are computed beside
the target because they are num_taps times smaller than what they are made of. Page tables come with the plan.
Used by `target_worker.py` and `drafter_worker.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ...cluster.plan import SchedulerOutput
from ...drafter.compute.backend import Backend
from ...drafter.compute.tensors import TensorFolder
from ...drafter.dflash.model import ContextFeatures
from ...drafter.dflash.propose import Proposer
from ...drafter.step.rows import StepRows
from ...drafter.step.states import RequestStates
from ..targets.loading.memory import gpu_budget_bytes, page_bytes
from ..targets.loading.operators import make_backend, make_step_operators
from ..targets.loading.plan import LoadPlan, plan_load
from ..targets.loading.rank import Checkpoints, lent_weights, pages_of, runs_on_device
from .process_group import ProcessGroups


class RemoteDrafts:
    """A target rank's source of drafts: a `host.DraftSource`, and a `runner.RemoteDrafter`."""

    def __init__(self, plan: LoadPlan, backend: Backend, groups: ProcessGroups) -> None:
        self._joint, self._drafter_rank = groups.joint, groups.drafter_rank
        self._link = groups.link  # target rank 0 alone speaks with the drafter
        if self._link is not None:
            self._features = _context_features(plan, backend)

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Tensor:
        """Wait for the drafter's proposals."""
        most = int(plan.num_drafts.max(initial=0))
        drafts_RK = torch.empty(plan.num_requests, most, dtype=torch.int64, device=states.device)
        return self._joint.broadcast(drafts_RK, self._drafter_rank) if most else drafts_RK

    def inject(self, taps_NmH: Tensor, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor) -> None:
        """Tell the drafter what stood, and give it what its context is made of."""
        if self._link is None:
            return
        self._link.broadcast(torch.cat((token_ids_RW, num_tokens_R.unsqueeze(1)), dim=1))
        self._link.broadcast(self._features(taps_NmH))

    def receive(self, num_rows: int) -> Tensor:
        """Wait for the drafter's proposals, where the device does the waiting."""
        drafts_N = torch.empty(num_rows, dtype=torch.int64, device=self._joint.device)
        return self._joint.broadcast(drafts_N, self._drafter_rank)

    def send(self, chosen_X: Tensor, taps_NmH: Tensor) -> None:
        """Tell the drafter what the target chose, and give it what its context is made of."""
        if self._link is None:
            return
        if len(chosen_X):
            self._link.broadcast(chosen_X)
        self._link.broadcast(self._features(taps_NmH))


def tell_num_pages(num_pages: tuple[int, ...], groups: ProcessGroups) -> None:
    """The end of a target rank's loading: the drafter waits for the pools' sizes, which are the same."""
    if groups.link is not None:
        groups.link.broadcast(torch.tensor(num_pages, device=groups.link.device))


class DrafterRunner(Protocol):
    """The drafter's side of every step. Steps run in the order of submission."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be under way."""
        ...

    def submit(self, plan: SchedulerOutput) -> None: ...

    def is_ready(self) -> bool: ...

    def collect(self) -> object:
        """Wait for the oldest step; what comes of it the target tells."""
        ...


@torch.inference_mode()
def start_drafter(config: EngineConfig, groups: ProcessGroups) -> DrafterRunner:
    """Load the drafter beside copies of the target's embedding and head.

    Raises:
        CheckpointError, ConfigError: from loading.
    """
    plan = plan_load(config)
    assert groups.link is not None, "the drafter speaks with target rank 0"
    backend = make_backend(plan)
    drafter = Checkpoints().drafter(plan, lent_weights(plan, backend), backend)
    told = torch.zeros(plan.pages.num_pools, dtype=torch.int64, device=plan.device)
    num_pages = tuple(groups.link.broadcast(told).tolist())
    _check_pages_fit(plan, num_pages)
    cache = drafter.new_cache(pages_of(plan.pages, plan.pages.drafter, num_pages), plan.page_size)
    if runs_on_device(plan):
        from .device_drafter import DeviceDrafter

        return DeviceDrafter(plan, drafter, cache, num_pages, groups)
    operators = make_step_operators(plan)
    size = (config.max_num_seqs, plan.max_model_len, num_pages, plan.page_size)
    states = RequestStates(*size, plan.device, backend.attention_batch, operators, plan.pages)
    return HostDrafter(Proposer(drafter, cache, operators), states, groups)


class HostDrafter:
    """A drafter whose steps the host drives."""

    max_in_flight = 1

    def __init__(self, proposer: Proposer, states: RequestStates, groups: ProcessGroups) -> None:
        assert groups.link is not None, "the drafter speaks with target rank 0"
        self._proposer, self._states = proposer, states
        self._joint, self._link, self._drafter_rank = groups.joint, groups.link, groups.drafter_rank

    @torch.inference_mode()
    def submit(self, plan: SchedulerOutput) -> None:
        """Propose, then learn what became of it."""
        states = self._states
        states.apply(plan)
        drafts_RK = self._proposer.propose(plan, states)
        if drafts_RK.shape[1]:
            self._joint.broadcast(drafts_RK, self._drafter_rank)
        rows = states.lay_out_rows(plan)
        verdict = torch.empty(
            plan.num_requests, drafts_RK.shape[1] + 2, dtype=torch.int64, device=states.device
        )
        self._link.broadcast(verdict)
        token_ids_RW, num_tokens_R = verdict[:, :-1], verdict[:, -1]
        states.advance(plan, token_ids_RW, num_tokens_R)
        drafter = self._proposer.drafter
        c_NH = torch.empty(
            plan.num_batched_tokens, drafter.config.hidden_size, dtype=drafter.dtype, device=drafter.device
        )
        self._proposer.inject_features(self._link.broadcast(c_NH), rows)

    def is_ready(self) -> bool:
        """A step that was submitted has ended."""
        return True

    def collect(self) -> None:
        """The result comes from the target."""


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
            f"The target's GPUs hold {num_pages[0]} K/V pages, the split drafter's only {fitting}. Set "
            "num_pages to at most that.",
            param="num_pages",
        )


def _context_features(plan: LoadPlan, backend: Backend) -> ContextFeatures:
    assert plan.drafter_folder is not None and plan.drafter is not None, "a split drafter has a checkpoint"
    folder = TensorFolder(plan.drafter_folder)
    fc, norm = (
        folder.get(name).to(device=plan.device, dtype=plan.dtype)
        for name in ("fc.weight", "hidden_norm.weight")
    )
    return ContextFeatures(fc, norm, plan.drafter.rms_norm_eps, backend)
