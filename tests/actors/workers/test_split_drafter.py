"""A split drafter and its target: two threads that communicate like processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta.actors.targets.loading.memory_budget import page_bytes
from manta.actors.targets.loading.operator_factory import make_backend
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.targets.model.tensor_parallel import SingleRank
from manta.actors.targets.runners.cuda_graphs import LazyGraphs, PassKind, StepGraphs
from manta.actors.workers.drafter import drafter_client as drafter_link
from manta.actors.workers.drafter import drafter_session
from manta.actors.workers.drafter.remote_drafter import RemoteDrafterSource
from manta.cluster.errors import ConfigError
from manta.cluster.step.scheduler_output import TreeShape, Trim
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.gpu_triton.linear.gemm_choice import MeasuredChoice, measured_rows
from manta.drafter.compute.gpu_triton.linear.projections import (
    ChosenProjection,
    OwnProjection,
    TorchProjection,
)
from manta.drafter.step.inputs.proposals import Proposals
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_drafter
from support.engines.device_engines import same_trees
from support.engines.devices import launch_in_turns, record_captures
from support.engines.split_pair import Pair
from support.engines.steps import GREEDY, Steps, open_runner, settings
from support.oracles.sampling_cases import WHOLE


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is not thread-safe, and slow."""
    launch_in_turns(monkeypatch)
    monkeypatch.setattr(drafter_link, "MIN_WAIT_S", 600.0)
    monkeypatch.setattr(drafter_link, "MAX_WAIT_S", 600.0)


class Ranks(SingleRank):
    """One of two ranks, which records its collectives."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world_size, self.seen = rank, 2, list[tuple[int, ...]]()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.seen.append(tuple(tensor.shape))
        return tensor


def test_what_one_rank_alone_computes_begins_no_collective(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's features: the other ranks would meet its choice of a kernel in a collective of theirs."""

    def chosen(
        backend: TritonBackend, weight: torch.Tensor, bias: torch.Tensor | None, make: Callable[[], Any]
    ) -> ChosenProjection:
        own = OwnProjection(weight, bias, backend._sums)
        return ChosenProjection(own, TorchProjection(make()), backend._choice)

    def library(_: MeasuredChoice, use: str, own: OwnProjection, *__: object) -> list[bool]:
        return [False] * len(measured_rows(own))

    monkeypatch.setattr(TritonBackend, "_projection", chosen)  # as on a GPU
    monkeypatch.setattr(MeasuredChoice, "_read_or_measure", library)
    spec = {"model": str(tiny_drafter), "placement": "split"}
    plan = resolve_config(settings(tiny_qwen3, attention_backend="triton", speculative_config=spec))
    assert plan.drafter is not None
    taps = torch.zeros(4, len(plan.tap_ids), plan.target.hidden_size)
    for rank in (0, 1):
        ranks = Ranks(rank)
        source = RemoteDrafterSource(plan, make_backend(plan, ranks), ranks)
        assert (source.features(taps) is None) == (rank == 1) and ranks.seen == []
        source.load(plan)
        source.use()
        assert (source.features(taps) is None) == (rank == 1) and ranks.seen == []


@pytest.mark.parametrize(
    "kind",
    [
        {"second": True},
        *(pytest.param(kind, marks=pytest.mark.if_changed) for kind in ({}, {"dspark": True})),
    ],
    ids=str,
)
def test_a_split_drafter_drafts_like_a_colocated_one(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    """Prompts in chunks, decoding with a prompt, ragged or trimmed drafts, filters; positions of slots are
    not sent."""
    drafter = make_tiny_drafter(tmp_path, **kind)
    spec: dict[str, object] = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    small = {"max_num_seqs": 2, "max_model_len": 48}
    host, _ = open_runner(tiny_qwen3, attention_backend="torch", speculative_config=spec, **small)
    expected: list[list[int]] = []
    propose = host.drafts.propose

    def listen(*args: object) -> Proposals:
        drafts_RK = (proposals := propose(*args)).drafts_RK
        expected.append(drafts_RK[drafts_RK >= 0].tolist())
        return proposals

    host.drafts.propose = listen
    pair = Pair(tiny_qwen3, spec, **small)
    exchanged = refuse_exchange_within_passes(pair, monkeypatch)
    assert pair.info.halves and pair.info.max_in_flight == 2
    steps, known = Steps(2, 48), np.array([3, 6])  # tokens of each
    narrow = replace(GREEDY, temperature=1.0, top_k=4, seed=9)
    enter = [steps.admit(0, [5, 6, 7]), steps.admit(1, [9, 8, 9, 8, 9, 8], narrow)]

    def run(
        computed: np.ndarray | list[int],
        rows: list[int],
        drafts: list[int],
        *,
        late: bool = False,
        trim: Trim | None = None,
        **how: Any,
    ) -> None:
        plan = replace(steps.plan([0, 1], computed, rows, drafts, **how), trim=trim)
        theirs = host.execute(plan)
        unknown = np.where(plan.num_drafts > 0, np.int32(-1), plan.num_computed)
        mine = pair.execute(replace(plan, num_computed=unknown))
        for got, count, best in zip(mine.token_ids, mine.num_tokens, theirs.token_ids, strict=True):
            assert got[:count].tolist() == best[:count].tolist()
        assert late or mine.num_tokens.tolist() == theirs.num_tokens.tolist()
        if trim is not None:
            assert mine.num_drafts is not None and theirs.num_drafts is not None
            assert mine.num_drafts.tolist() == theirs.num_drafts.tolist() and mine.num_drafts.sum() == 2
        if any(drafts) and not late:
            assert mine.margins is not None and theirs.margins is not None
            np.testing.assert_allclose(mine.margins, theirs.margins, rtol=1e-3, atol=1e-3)
        known[:] += mine.num_tokens

    run([0, 0], [3, 4], [0, 0], admitted=enter, samples=[True, False])
    run([3, 4], [4, 2], [3, 0])
    even_K, ones_R = np.full(3, 0.5, np.float32), np.ones(2, np.float32)
    trim = Trim(even_K, even_K, 0 * ones_R, ones_R, np.empty(0, np.float32), num_rows=4)
    run(known - 1, [2, 3], [1, 2], trim=trim)
    link = pair.remote.link
    assert link is not None
    link.drafts = lambda step, shape: None  # too late: both sides judge zeros in their place
    run(known - 1, [3, 2], [2, 1], late=True)
    del link.drafts
    run(known - 1, [2, 3], [1, 2])
    alone, both, _, again = (
        drafts_N.tolist() for drafts_N in pair.drafts
    )  # a block's first row drafts nothing
    assert [alone[1:4], both[1:2] + both[3:5]] == expected[1:3]
    assert again[1:2] + again[3:5] == expected[4]
    assert exchanged == [*["send"], *["receive", "send", "send"], *["receive", "send"] * 3]
    pair.close()


# (heads, kernels, steps before and after the one whose drafts are late)
TREES = [
    ({}, "torch", 4),
    ({"selector": True}, "torch", 4),
    ({}, "triton", 2),
    *[({"dspark": True}, "triton", 2)] * WHOLE,
]


@pytest.mark.parametrize(("kind", "kernels", "num_steps"), TREES, ids=str)
def test_a_split_drafter_drafts_the_trees_of_a_colocated_one(
    tiny_qwen3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: dict[str, Any],
    kernels: str,
    num_steps: int,
) -> None:
    """Driven by host or device: prompts beside trees, trimmed trees, and a step whose drafts are late."""
    drafter = make_tiny_drafter(tmp_path, **kind)
    spec: dict[str, object] = {"model": str(drafter), "tree_width": 3, "tree_size": 15, "adaptive": False}
    small = {"max_num_seqs": 2, "max_model_len": 128, "page_size": 16}
    host, _ = open_runner(tiny_qwen3, speculative_config=spec, attention_backend="torch", **small)
    pair = Pair(tiny_qwen3, spec, attention_backend=kernels, **small)
    exchanged = refuse_exchange_within_passes(pair, monkeypatch)
    steps, known, shape = Steps(2, 128), np.array([3, 6]), TreeShape(5, 3, (1.0,) * 3)
    even_K, ones_R = np.full(5, 0.5, np.float32), np.ones(2, np.float32)
    trim = Trim(even_K, even_K, 0 * ones_R, ones_R, np.empty(0, np.float32), num_rows=None)
    hot, narrow = (replace(GREEDY, temperature=t, top_k=k, seed=9) for t, k in ((4.0, 0), (1.0, 4)))
    enter = [steps.admit(0, [5, 6, 7], hot), steps.admit(1, [9, 8, 9, 8, 9, 8], narrow)]
    ranks: list[int] = []  # of accepted drafts among their siblings

    def run(
        computed: Any,
        rows: list[int],
        drafts: list[int],
        *,
        late: bool = False,
        most_rows: int = 24,
        **how: Any,
    ) -> bool:
        """Compare a step with at most so many rows of decoding requests; return whether it verified trees."""
        plan = replace(steps.plan([0, 1], computed, rows, drafts, **how), tree=shape)
        of_prompts = sum(count for count, drafted in zip(rows, drafts, strict=True) if count != drafted + 1)
        plan = replace(plan, trim=replace(trim, num_rows=most_rows + of_prompts))
        theirs = host.execute(plan.with_num_drafts(0 * plan.num_drafts) if late else plan)
        if kernels == "triton":  # where prompts have a pass of their own, and positions are known
            unknown = np.where(plan.num_drafts > 0, np.int32(-1), plan.num_computed)
            plan = replace(plan, num_computed=unknown, trim=replace(trim, num_rows=most_rows))
        mine = pair.execute(plan)
        assert mine.token_ids[:, : theirs.token_ids.shape[1]].tolist() == theirs.token_ids.tolist()
        assert mine.num_tokens.tolist() == theirs.num_tokens.tolist()
        assert mine.num_drafts is not None and theirs.num_drafts is not None
        assert mine.num_drafts.tolist() == theirs.num_drafts.tolist()
        known[:] += mine.num_tokens
        if mine.trees is None:
            assert theirs.trees is None
            return False
        assert theirs.trees is not None
        same_trees(mine.trees, theirs.trees)
        ranks.extend(mine.trees.ranks_RW.ravel().tolist())
        return True

    run([0, 0], [3, 4], [0, 0], admitted=enter, samples=[True, False])
    assert run([3, 4], [16, 2], [15, 0]), "a tree beside a prompt"
    assert sum(run(known - 1, [16, 8], [15, 7]) for _ in range(num_steps)) > 0
    link = pair.remote.link
    assert link is not None
    link.drafts = lambda step, kinds: None  # too late: nothing is drafted
    assert not run(known - 1, [16, 8], [15, 7], late=True)
    del link.drafts
    assert sum(run(known - 1, [16, 8], [15, 7], most_rows=12) for _ in range(num_steps)) > 0
    assert 0 in ranks, "main paths were accepted"
    assert max(ranks) > 0 or kind == {"dspark": True}, "branches were accepted"
    assert exchanged == [] or exchanged.count("receive") == 2 + 2 * num_steps
    pair.close()


def refuse_exchange_within_passes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of what the target will receive and send: always outside of what a graph would hold."""
    exchanged: list[str] = []
    within: list[bool] = []
    run = StepGraphs.replay

    def replay(graphs: StepGraphs, kind: PassKind) -> None:
        within.append(True)
        run(graphs, kind)
        within.pop()

    monkeypatch.setattr(StepGraphs, "replay", replay)

    def note(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def noted(*values: object) -> None:
            assert not within, "a graph holds neither waits nor messages"
            exchanged.append(name)
            real(*values)

        return noted

    for name in ("receive", "send"):
        monkeypatch.setattr(pair.remote, name, note(name, getattr(pair.remote, name)))
    return exchanged


def test_passes_of_a_session_are_captured_when_they_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_captures(monkeypatch)
    graphs = LazyGraphs(torch.device("cuda", 0))
    kinds = [PassKind(drafts, 1, 4, 4, False) for drafts in (True, False)]
    for _ in range(3):
        for kind in kinds:
            graphs.run(kind, lambda kind=kind: calls.append("draft" if kind.drafts else "take in"))
    captured = [["begin in pool 0", name, "end", "replay"] for name in ("draft", "take in")]
    assert calls == ["draft", "take in", *captured[0], *captured[1], "replay", "replay"]


def test_a_session_is_refused_if_pages_leave_no_memory_for_its_steps(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graphs are captured later; a block's logits are counted in a pass and in its graph."""
    given, reserved = 10**9, list[int]()

    def budget(device: torch.device, utilization: float, step_bytes: int) -> int:
        reserved.append(step_bytes)
        return given - step_bytes

    monkeypatch.setattr(drafter_session, "gpu_budget_bytes", budget)
    spec = {"model": str(tiny_drafter), "num_speculative_tokens": 3}
    for seqs in (2, 4):
        config = settings(tiny_qwen3, speculative_config=spec, max_num_seqs=seqs, max_num_batched_tokens=64)
        plan = replace(resolve_config(config), device=torch.device("cuda"))
        (size,) = page_bytes(plan, target=False)
        drafter_session._check_pages_fit(plan, (1,))
        fits = (given - reserved[-1]) // size
        drafter_session._check_pages_fit(plan, (fits,))
        with pytest.raises(ConfigError, match=rf"only {fits} of them"):
            drafter_session._check_pages_fit(plan, (fits + 1,))
    assert reserved[-1] - reserved[0] == 2 * (2 * 4) * TINY_VOCAB * plan.dtype.itemsize
