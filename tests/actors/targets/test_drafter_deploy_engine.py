"""Two drafters in one engine: each drafts as if alone, neither changes a token, each can be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.actors.targets.runners.colocated_drafter import ColocatedDrafter
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import CheckpointError, ConfigError
from manta.cluster.request.request import Request, SamplingParams
from manta.cluster.step.scheduler_output import SchedulerOutput
from manta.drafter.step.inputs.proposals import Proposals
from manta.drafter.step.request_states import RequestStates
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_drafter
from support.engines.steps import settings

Seen = dict[tuple[str, int], tuple[int, ...]]  # drafts, by request and position
LONG = 24  # tokens of an answer


class Served:
    """An engine in this process that records its drafts."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = InProcessExecutor(config)
        self.engine = EngineCore(config, self.executor)
        self.seen: Seen = {}
        runner = self.executor._runner
        assert isinstance(runner, CpuModelRunner) and isinstance(runner.drafts, ColocatedDrafter)
        runner.drafts.propose = partial(self._propose, runner.drafts.propose)  # type: ignore[method-assign]
        self._request_of: dict[int, str] = {}

    def _propose(self, inner: Callable, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        self._request_of |= {request.slot: request.request_id for request in plan.admitted}
        proposals = inner(plan, states)
        if plan.tree is not None and plan.num_draft_tokens:
            counts_R = sum(blocks.counts_R for blocks in proposals.candidates)
            assert isinstance(counts_R, torch.Tensor), "a drafter gives candidates"
            assert counts_R.tolist() == plan.block_drafts.tolist()
        first_R = states._requests(plan).first_R.tolist()
        for slot, first, count, drafts in zip(
            plan.slots.tolist(),
            first_R,
            plan.num_drafts.tolist(),
            proposals.drafts_RK.tolist() if plan.num_drafts.any() else [[]] * plan.num_requests,
            strict=True,
        ):
            if count:
                self.seen[self._request_of[slot], first] = tuple(drafts[:count])
        return proposals

    def answers(
        self, requests: list[Request], at_step: dict[int, Callable[[], None]]
    ) -> dict[str, list[int]]:
        """Serve all requests together; `actions` run before some steps."""
        found: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.engine.add_request(request)
        step = 0
        while self.engine.has_unfinished:
            at_step.get(step, lambda: None)()
            for update in self.engine.step():
                found[update.request_id] += update.token_ids
            self.engine.check_invariants()
            step += 1
        return found

    def begin(self, drafter: Path) -> None:
        self.executor.begin_trial(str(drafter))
        self.engine.begin_trial()

    def end(self, *, promoted: bool) -> None:
        self.executor.end_trial(promoted=promoted)
        self.engine.end_trial(promoted=promoted)


def requests(name: str, on_trial: Callable[[int], bool] = lambda i: False) -> list[Request]:
    """Return four requests, greedy and sampled, with a common prefix: their pages are shared."""
    shared = [3 + i % 90 for i in range(20)]
    return [
        Request(
            request_id=f"{name}{i}",
            prompt_token_ids=(*shared, *(5 + (7 * i * k) % (TINY_VOCAB - 9) for k in range(1, 6 + i))),
            params=SamplingParams(temperature=float(i % 2), seed=40 + i, max_tokens=LONG, ignore_eos=True),
            on_trial=on_trial(i),
        )
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module")
def config(tiny_qwen3: Path, tiny_drafter: Path) -> EngineConfig:
    return settings(tiny_qwen3, tiny_drafter, page_size=8, max_num_seqs=8)


@pytest.fixture(scope="module")
def alone(config: EngineConfig, other: Path) -> Iterator[dict[str, tuple[dict[str, list[int]], Seen]]]:
    found = {}
    spec = config.speculative_config
    assert spec is not None
    for name, model in (("own", spec.model), ("other", str(other))):
        served = Served(replace(config, speculative_config=replace(spec, model=model)))
        found[name] = served.answers(requests("r"), {}), served.seen
        served.executor.close()
    yield found


def same(seen: Seen, wanted: Seen, name: str) -> int:
    """Return how many blocks of the requests with this name equal the expected ones."""
    shared = [key for key in seen if key[0] == name and key in wanted]
    for key in shared:
        assert seen[key] == wanted[key], f"at {key}"
    return len(shared)


def test_each_drafter_drafts_for_its_requests_as_if_alone(config: EngineConfig, alone, other: Path) -> None:
    served = Served(config)
    served.answers(requests("before"), {})  # pages that the candidate does not know
    served.begin(other)
    tried = served.answers(requests("r", lambda i: i in (1, 2)), {})
    assert tried == alone["own"][0] == alone["other"][0], "no token depends on who drafts"
    for i in range(4):
        mine, its = ("other", "own") if i in (1, 2) else ("own", "other")
        assert same(served.seen, alone[mine][1], f"r{i}") >= 5
        with pytest.raises(AssertionError):
            same(served.seen, alone[its][1], f"r{i}")
    served.executor.close()


def test_both_drafters_of_a_trial_grow_trees(config: EngineConfig, alone, other: Path) -> None:
    assert config.speculative_config is not None
    tree = replace(config.speculative_config, tree_width=3, tree_size=15)
    served = Served(replace(config, speculative_config=tree))
    served.begin(other)
    assert served.answers(requests("r", lambda i: i in (1, 2)), {}) == alone["own"][0]
    in_both = served.engine.stats().num_trees
    assert served.answers(requests("r", lambda i: True), {}) == alone["own"][0]
    assert served.engine.stats().num_trees > in_both > 0
    served.executor.close()


@pytest.mark.parametrize("promoted", [True, False])
def test_requests_continue_with_the_remaining_drafter_after_a_trial(
    config: EngineConfig, alone, other: Path, promoted: bool
) -> None:
    served = Served(config)
    begin, end = partial(served.begin, other), partial(served.end, promoted=promoted)
    running = served.answers(requests("r", lambda i: i == 1), {2: begin, 9: end})
    assert running == alone["own"][0]
    served.seen.clear()
    after = served.answers(requests("r", lambda i: i == 1), {})
    assert after == alone["own"][0]
    name = "other" if promoted else "own"
    assert all(same(served.seen, alone[name][1], f"r{i}") >= 5 for i in range(4))
    served.executor.close()


def test_requests_that_started_in_a_trial_are_not_recomputed(
    config: EngineConfig, alone, other: Path
) -> None:
    for promoted in (True, False):
        served = Served(config)
        served.begin(other)

        def end(served=served, promoted=promoted) -> None:
            served.end(promoted=promoted)
            served.seen.clear()

        assert served.answers(requests("r"), {9: end}) == alone["own"][0]
        stats = served.engine.stats()
        assert stats.drafter_refilled_tokens == 0 and stats.drafter_losses == 0
        wanted = alone["other" if promoted else "own"][1]
        assert sum(same(served.seen, wanted, f"r{i}") for i in range(4)) >= 4
        served.executor.close()


def test_an_unfitting_candidate_is_refused_and_changes_nothing(
    config: EngineConfig, alone, tmp_path: Path
) -> None:
    served = Served(config)
    shorter = make_tiny_drafter(tmp_path / "shorter", block_size=4)
    for model, error in ((str(tmp_path / "nothing"), CheckpointError), (str(shorter), ConfigError)):
        with pytest.raises(error, match=r"speculative_config\.model|num_speculative_tokens"):
            served.executor.begin_trial(model)
    assert served.answers(requests("r", lambda i: True), {}) == alone["own"][0]
    assert all(same(served.seen, alone["own"][1], f"r{i}") >= 5 for i in range(4))
    served.executor.close()
