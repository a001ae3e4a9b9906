"""An engine whose drafter's chains are recorded, with their logits, and what chains of every kind must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.actors.targets.runners.drafts.colocated_drafter import ColocatedDrafter
from manta.actors.targets.runners.drafts.draft_source import Drafter
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.request.request import Request, SamplingParams
from manta.cluster.step.scheduler_output import SchedulerOutput
from manta.drafter.dflash.proposer import DFlashProposer
from manta.drafter.eagle3.proposer import ChainProposer
from manta.drafter.step.inputs.proposals import Proposals
from manta.drafter.step.request_states import RequestStates

from support.checkpoints.tiny import TINY_VOCAB
from support.engines.steps import Steps, settings
from support.oracles.oracle_dflash import gumbel

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
WARM = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
noise = cache(gumbel)
Choice = Callable[[torch.Tensor, int], int]  # the token of logits at a position
ChainsOf = Callable[[list[int], list[int], Choice], Mapping[int, tuple[list[int], list[torch.Tensor]]]]


def prompt(length: int) -> list[int]:
    return torch.randint(1, TINY_VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


PROMPTS = [prompt(n) for n in (1, 18, 37)]

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


@cache
def plain_tokens(target: str, params: SamplingParams) -> list[list[int]]:
    """Return the tokens of `PROMPTS` by plain decoding."""
    return Served(settings(Path(target))).tokens(PROMPTS, params)


def assert_chains_equal(config: EngineConfig, params: SamplingParams, of: ChainsOf) -> None:
    """Compare all chains of an engine with an oracle's, and its tokens with those of plain decoding.

    Args:
        of: the oracle: drafts and logits after each of some positions of a sequence, by position.
    """
    served = Served(config)
    new = served.tokens(PROMPTS, params)
    assert new == plain_tokens(config.model, params)
    assert served.chains is not None
    for i, tokens in enumerate(PROMPTS):
        ours = {at: found for (name, at), found in served.chains.seen.items() if name == f"r{i}"}
        assert len(ours) > 1

        def choose(z: torch.Tensor, at: int, seed: int = 10 + i) -> int:
            return int((z + noise(seed, at, TINY_VOCAB) if params.temperature else z).argmax())

        expected = of([*tokens, *new[i]], list(ours), choose)
        for at, (drafts, logits) in ours.items():
            right, theirs = expected[at]
            assert drafts == right[: len(drafts)], (i, at)
            for z, z_right in zip(logits, theirs, strict=False):
                kept = z_right.isfinite()
                assert torch.equal(kept, z.isfinite())
                assert torch.allclose(z[kept].double(), z_right[kept].double(), atol=2e-4), (i, at)


def assert_prefix_hits_keep_chains(config: EngineConfig) -> list[int]:
    """Serve prompts with common prefixes, with and without the cache; return the cached tokens by request."""
    shared = prompt(40)
    cold, warm = Served(replace(config, enable_prefix_caching=False)), Served(config)
    for i, tokens in enumerate([shared, [*shared, 7, 8, 9], [*shared[:32], 5], shared]):
        assert warm.tokens([tokens], WARM, i) == cold.tokens([tokens], WARM, i)
    assert warm.chains is not None and cold.chains is not None
    assert same_chains(warm.chains.seen, cold.chains.seen) > 10
    assert max(warm.num_cached.values()) >= 32
    return list(warm.num_cached.values())


def decode_alone(
    runner: CpuModelRunner, tokens: list[int], num_drafts: int, num_steps: int = 8
) -> list[tuple[list[int], int, list[float]]]:
    """Return the tokens of each step of one request, how many drafts were verified, and their margins."""
    steps = Steps(2, num_groups=len(runner.states.page_tables_GSP))
    known, found = len(tokens), list[tuple[list[int], int, list[float]]]()
    plan = steps.plan([0], [0], [known], admitted=[steps.admit(0, tokens)])
    for _ in range(num_steps):
        result = runner.execute(plan)
        assert result.num_drafts is not None
        new = result.token_ids[0, : result.num_tokens[0]].tolist()
        margins = [] if result.margins is None else result.margins[0].tolist()
        found.append((new, int(result.num_drafts[0]), margins))
        known += len(new)
        plan = steps.plan([0], [known - 1], [1 + num_drafts], [num_drafts])
    return found


def texts(found: list[tuple[list[int], int, list[float]]]) -> list[int]:
    """Return the tokens of all steps."""
    return [token for tokens, *_ in found for token in tokens]
