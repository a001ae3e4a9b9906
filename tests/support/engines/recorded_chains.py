"""An engine whose drafter's chains are recorded, with their logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.actors.targets.runners.colocated_drafter import ColocatedDrafter
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.actors.targets.runners.runner_interface import Drafter
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.request.request import Request, SamplingParams
from manta.cluster.step.scheduler_output import SchedulerOutput
from manta.drafter.dflash.proposer import DFlashProposer
from manta.drafter.eagle3.proposer import ChainProposer
from manta.drafter.step.inputs.proposals import Proposals
from manta.drafter.step.request_states import RequestStates

Seen = dict[tuple[str, int], tuple[list[int], list[torch.Tensor]]]  # by request and position of the anchor


class Chains(ColocatedDrafter):
    """A proposer that records its chains and their logits, by request and position of the anchor."""

    def __init__(self, inner: ColocatedDrafter) -> None:
        super().__init__(inner._proposer, inner._communicator)
        self.seen: Seen = {}
        self._request_of: dict[int, str] = {}
        self._logits: list[torch.Tensor] = []
        self._listen()

    def _listen(self) -> None:
        assert isinstance(self._proposer, DFlashProposer | ChainProposer)
        drafter = self._proposer.drafter
        logits = drafter.logits

        def kept(normed_XH: torch.Tensor) -> torch.Tensor:
            self._logits.append(logits(normed_XH))
            return self._logits[-1].clone()  # sampling may edit it

        drafter.logits = kept  # type: ignore[method-assign]

    def swap_drafter(self, drafter: Drafter) -> None:
        super().swap_drafter(drafter)
        self._listen()

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        self._request_of |= {request.slot: request.request_id for request in plan.admitted}
        anchors = states._requests(plan).first_R.tolist()
        self._logits.clear()
        proposals = super().propose(plan, states)
        for r, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_drafts.tolist(), strict=True)):
            if count:
                rows = [int((plan.num_drafts[:r] > k).sum()) for k in range(count)]
                logits = [self._logits[k][row] for k, row in enumerate(rows)]
                self.seen[self._request_of[slot], anchors[r]] = (
                    proposals.drafts_RK[r, :count].tolist(),
                    logits,
                )
                assert proposals.margins_RK is not None
                assert (proposals.margins_RK[r, :count] >= 0).all()
        return proposals


class Served:
    """An engine whose chains are recorded."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = InProcessExecutor(config)
        self.engine = EngineCore(config, self.executor)
        runner = self.executor._runner
        assert isinstance(runner, CpuModelRunner)
        self.chains = Chains(runner.drafts) if isinstance(runner.drafts, ColocatedDrafter) else None
        if self.chains is not None:
            runner.drafts = self.chains
        self.num_cached: dict[str, int] = {}

    def tokens(self, prompts: list[list[int]], params: SamplingParams, first: int = 0) -> list[list[int]]:
        """Return the new tokens of all prompts, served together; request i has seed 10 + `first` + i."""
        found: dict[str, list[int]] = {}
        for i, tokens in enumerate(prompts, first):
            found[f"r{i}"] = []
            seeded = replace(params, seed=10 + i)
            request = Request(request_id=f"r{i}", prompt_token_ids=tuple(tokens), params=seeded)
            self.engine.add_request(request)
        while self.engine.has_unfinished:
            for update in self.engine.step():
                found[update.request_id] += update.token_ids
                known = self.num_cached.get(update.request_id, 0)
                self.num_cached[update.request_id] = max(known, update.num_cached_tokens)
        return list(found.values())


def same_chains(ours: Seen, right: Seen) -> int:
    """Count the anchors common to both; fail if one engine's drafts are no prefix of the other's."""
    both = ours.keys() & right.keys()
    for at in both:
        pairs = list(zip(*(seen[at][0] for seen in (ours, right)), strict=False))
        assert all(mine == other for mine, other in pairs), at
        assert torch.allclose(ours[at][1][0], right[at][1][0], atol=1e-4), at
    return len(both)
