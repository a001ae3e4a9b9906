"""A split drafter whose steps the device drives: the twin of `HostDrafter`, over request state on the device.

It takes the plans that the target takes, so it has the same passes with the same rows, padding included, and
all sizes of what is said are known. The target's choices come as they are, and the same kernel judges the
drafts by them on both sides: nothing waits for the host, and a step may start before the last one's end.
What is said goes by NCCL or gloo as the passes are launched, so none of it is in a CUDA graph yet. Loaded by
`split_drafter.py`.

Legend: N rows of a pass, X sampled rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...drafter.compute.kv_cache import PagedKVCache
from ...drafter.dflash.model import DFlashDrafter
from ...drafter.step.device.rows import StepRequests, lay_out_block, lay_out_rows, place_drafts
from ...drafter.step.device.sampling import SamplingWorkspace, sample_rows
from ...drafter.step.device.states import DeviceStates
from ...drafter.step.device.verification import accept_and_advance
from ..targets.loading.plan import LoadPlan
from ..targets.loading.rank import device_room, runs_ahead
from ..targets.runners.device import DeviceSteps
from ..targets.runners.outcome import Outcome
from .process_group import Communicator, ProcessGroups


class DeviceDrafter(DeviceSteps):
    """See the module's text.

    Args:
        num_pages: of each pool, as the target has them.
    """

    def __init__(
        self,
        plan: LoadPlan,
        drafter: DFlashDrafter,
        cache: PagedKVCache,
        num_pages: tuple[int, ...],
        groups: ProcessGroups,
    ) -> None:
        config, (max_requests, num_rows) = plan.config, device_room(plan)
        size = (config.max_num_seqs, plan.max_model_len, num_pages, plan.page_size)
        models = _DrafterModels(
            drafter=drafter,
            cache=cache,
            states=DeviceStates(*size, plan.device, plan.pages),
            workspace=SamplingWorkspace.build(num_rows, plan.target.vocab_size, plan.device),
            groups=groups,
        )
        super().__init__(models, max_requests, plan.num_speculative_tokens, config.max_num_batched_tokens)
        self.max_in_flight = 2 if runs_ahead(plan) else 1


@dataclass(frozen=True, slots=True)
class _DrafterModels:
    """What a drafter's passes run on."""

    drafter: DFlashDrafter
    cache: PagedKVCache
    states: DeviceStates
    workspace: SamplingWorkspace
    groups: ProcessGroups

    @property
    def link(self) -> Communicator:
        assert self.groups.link is not None, "the drafter speaks with target rank 0"
        return self.groups.link

    @property
    def device(self) -> torch.device:
        return self.drafter.device

    def iteration(self, requests: StepRequests, outcome: Outcome, *, filters: bool) -> _DrafterIteration:
        return _DrafterIteration(self, requests, outcome, filters=filters)


class _DrafterIteration:
    """The other side of an `Iteration` over the same inputs."""

    parts = ()  # the target's times are the step's

    def __init__(
        self, models: _DrafterModels, requests: StepRequests, outcome: Outcome, *, filters: bool
    ) -> None:
        self._models, self._requests, self._outcome, self._filters = models, requests, outcome, filters

    def run(self) -> None:
        """Propose, judge the proposals by what the target chose, make context of its features."""
        models, requests = self._models, self._requests
        if requests.max_drafts:
            self._draft()
        tables, sampled_X = models.states.tables, requests.sampled_X
        rows = lay_out_rows(requests, tables)
        num_chosen = requests.num_rows if sampled_X is None else len(sampled_X)
        chosen_X = torch.empty(num_chosen, dtype=torch.int64, device=models.device)
        if num_chosen:  # chunks of prompts may choose nothing
            models.link.broadcast(chosen_X)
        accept_and_advance(chosen_X, requests, tables, self._outcome.rows_RW1)
        drafter = models.drafter
        size = (requests.num_rows, drafter.config.hidden_size)
        c_NH = torch.empty(size, dtype=drafter.dtype, device=models.device)
        drafter.write_context(models.link.broadcast(c_NH), rows, models.cache)

    def _draft(self) -> None:
        models, drafter = self._models, self._models.drafter
        rows = lay_out_block(self._requests, models.states.tables, drafter.config.mask_token_id)
        hidden_NH = drafter.forward(drafter.embed_block(rows.token_ids_N), rows, models.cache)
        chosen_N, _ = sample_rows(
            drafter.logits(hidden_NH),
            rows.slots_N,
            rows.positions_N,
            models.states.sampling,
            filters=self._filters,
            workspace=models.workspace,
            drafts=True,
        )
        models.groups.joint.broadcast(chosen_N, models.groups.drafter_rank)
        place_drafts(chosen_N, rows, models.states.tables)
