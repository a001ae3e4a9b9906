"""Steps end to end through the engine: drafts, verification, context; against transformers and an oracle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.actors.engine.uniproc_executor import InProcessExecutor, make_executor
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.actors.targets.runners.drafts.colocated_drafter import ColocatedDrafter
from manta.actors.targets.runners.drafts.draft_source import DraftSource
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import EngineDeadError
from manta.cluster.request.request import Request, SamplingParams
from manta.cluster.step.scheduler_output import SchedulerOutput
from manta.drafter.step.inputs.proposals import Proposals
from manta.drafter.step.inputs.row_layout import StepRows
from manta.drafter.step.request_states import RequestStates
from safetensors.torch import load_file
from support.checkpoints.tiny import TINY_BLOCK, TINY_VOCAB
from support.engines.cluster_checker import generate
from support.engines.steps import GREEDY, Steps, open_runner, settings
from support.oracles.oracle_dflash import Oracle, decode, gumbel

GREEDY_PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=24)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, TINY_VOCAB - 1, length).tolist()


PROMPTS = [prompt(n, n) for n in (1, 18, 37, 64)]


def run(
    executor: InProcessExecutor, config: EngineConfig, prompts: list[list[int]], params: SamplingParams
) -> list[list[int]]:
    """Return the new tokens of all prompts, served together; request i has seed 10 + i."""
    requests = [
        Request(request_id=f"r{i}", prompt_token_ids=tuple(tokens), params=replace(params, seed=10 + i))
        for i, tokens in enumerate(prompts)
    ]
    return list(generate(EngineCore(config, executor), *requests).values())


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture(scope="module")
def hugging_face(target: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    config = settings(target)
    executor = InProcessExecutor(config)
    return [run(executor, config, [p], GREEDY_PARAMS)[0] for p in PROMPTS]


class Recorded:
    def __init__(self, inner: DraftSource) -> None:
        self._inner = inner
        self.seen: list[tuple[int, list[int]]] = []

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        proposals = self._inner.propose(plan, states)
        for anchor, row in zip(plan.num_computed.tolist(), proposals.drafts_RK.tolist(), strict=True):
            if row:
                self.seen.append((anchor, [token for token in row if token >= 0]))
        return proposals

    def inject(self, *step: object) -> None:
        self._inner.inject(*step)  # type: ignore[arg-type]


def record_drafts(executor: InProcessExecutor) -> Recorded:
    runner = executor._runner
    assert runner is not None and isinstance(runner.drafts, ColocatedDrafter)
    runner.drafts = recorded = Recorded(runner.drafts)
    return recorded


@pytest.mark.parametrize("seed", [None, 10])
def test_drafts_equal_the_oracles_after_chunked_prefill(
    target: Path, tiny_drafter: Path, hugging_face, seed: int | None
) -> None:
    config = settings(target, tiny_drafter, max_num_batched_tokens=16, page_size=8)
    executor = InProcessExecutor(config)
    recorded = record_drafts(executor)
    params = GREEDY_PARAMS if seed is None else SamplingParams(max_tokens=24, ignore_eos=True)
    (tokens,) = run(executor, config, [PROMPTS[2]], params)

    weights = {k: v.detach() for k, v in hugging_face.state_dict().items()}
    oracle = Oracle(
        json.loads((tiny_drafter / "config.json").read_text()),
        load_file(tiny_drafter / "model.safetensors"),
        weights["model.embed_tokens.weight"],
        weights["lm_head.weight"],
    )
    choose = seed and (lambda z, at: int((z.double() + gumbel(seed, at, TINY_VOCAB)).argmax()))
    expected, steps = decode(hugging_face, oracle, PROMPTS[2], len(tokens), TINY_BLOCK, choose)
    assert tokens == expected
    theirs = [(s.position, s.drafts) for s in steps if s.drafts]
    # Near the end both shorten the block by different rules, and a shorter block has other drafts.
    whole = [step for step in theirs if len(step[1]) == TINY_BLOCK - 1]
    assert len(whole) >= 3
    assert [step for step in recorded.seen if len(step[1]) == TINY_BLOCK - 1] == whole


class KnowsAll:
    """A proposer that knows the output; `wrong_at` makes that draft of every block wrong."""

    def __init__(self, texts: dict[int, list[int]], wrong_at: int | None = None) -> None:
        self._texts, self._wrong_at = texts, wrong_at
        self.injected: list[list[int]] = []

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        width = int(plan.num_drafts.max(initial=0))
        drafts = torch.full((plan.num_requests, width), -1)
        for r, (slot, n, k) in enumerate(zip(plan.slots, plan.num_computed, plan.num_drafts, strict=True)):
            block = self._texts[int(slot)][n + 1 : n + 1 + k]
            drafts[r, : len(block)] = torch.tensor(block)
            if self._wrong_at is not None and len(block) > self._wrong_at:
                drafts[r, self._wrong_at] = (block[self._wrong_at] + 1) % TINY_VOCAB
        return Proposals(drafts, None)

    def inject(self, taps, rows: StepRows, token_ids, num_tokens) -> None:
        assert len(taps) == len(rows.positions_N) == len(rows.token_ids_N)
        self.injected.append(num_tokens.tolist())


@pytest.mark.parametrize("wrong_at", [None, 0, 2, 5])
def test_correct_drafts_are_accepted_up_to_the_first_wrong_one(
    target: Path, tiny_drafter: Path, plain: list[list[int]], wrong_at: int | None
) -> None:
    runner, _ = open_runner(target, tiny_drafter)
    texts = [p + t for p, t in zip(PROMPTS[:2], plain[:2], strict=True)]
    source = KnowsAll(dict(enumerate(texts)), wrong_at)
    runner.drafts = source
    steps = Steps(4)
    known = [texts[0][:9], texts[1][:30]]
    enter = [steps.admit(s, t) for s, t in enumerate(known)]
    first = runner.execute(steps.plan([0, 1], [0, 0], [8, 29], admitted=enter, samples=[False, False]))
    assert first.num_tokens.tolist() == [0, 0] and (first.token_ids == -1).all(), "chunks give no token"
    result = runner.execute(steps.plan([0, 1], [8, 29], [8, 5], [7, 4]))
    for r, drafts in enumerate((7, 4)):
        stood = drafts if wrong_at is None or wrong_at >= drafts else wrong_at
        assert result.num_tokens[r] == stood + 1
        begin = len(known[r])
        assert result.token_ids[r, : stood + 1].tolist() == texts[r][begin : begin + stood + 1]
        assert (result.token_ids[r, stood + 1 :] == -1).all()
    assert source.injected == [[0, 0], result.num_tokens.tolist()]
    assert result.token_ids.dtype == result.num_tokens.dtype == np.int32
    timings = result.timings
    assert min(timings.draft_s, timings.verify_s, timings.sample_s, timings.inject_s) > 0


def test_missing_drafts_cost_no_token(target: Path, tiny_drafter: Path, plain: list[list[int]]) -> None:
    runner, _ = open_runner(target, tiny_drafter)
    runner.drafts = KnowsAll({0: [-1] * 200})
    steps, text = Steps(4), PROMPTS[1] + plain[1]
    n = len(PROMPTS[1])
    first = runner.execute(steps.plan([0], [0], [n], admitted=[steps.admit(0, PROMPTS[1])]))
    assert first.token_ids[0, 0] == text[n]
    for at in range(n, n + 4):
        result = runner.execute(steps.plan([0], [at], [6], [5]))
        assert result.token_ids[0].tolist() == [text[at + 1], -1, -1, -1, -1, -1]


def test_a_shared_prefix_keeps_the_drafters_context(
    target: Path, tiny_drafter: Path, plain: list[list[int]]
) -> None:
    config = settings(target, tiny_drafter)
    executor = InProcessExecutor(config)
    recorded = record_drafts(executor)
    engine = EngineCore(config, executor)
    drafts = []
    for i in range(2):
        recorded.seen.clear()
        request = Request(request_id=f"r{i}", prompt_token_ids=tuple(PROMPTS[3]), params=GREEDY_PARAMS)
        engine.add_request(request)
        updates = []
        while engine.has_unfinished:
            updates += engine.step()
        drafts.append(list(recorded.seen))
        assert [t for u in updates for t in u.token_ids] == plain[3]
        assert (updates[0].num_cached_tokens > 0) == (i == 1)
    assert drafts[0] == drafts[1]


def test_a_closed_executor_is_dead_and_can_be_closed_again(tiny_qwen3: Path) -> None:
    config = settings(tiny_qwen3, num_threads=1)
    executor = make_executor(config)
    assert isinstance(executor, InProcessExecutor)
    assert torch.get_num_threads() == 1
    executor.check_health()
    executor.close()
    executor.close()
    with pytest.raises(EngineDeadError, match="closed"):
        executor.check_health()
    steps = Steps(4)
    with pytest.raises(EngineDeadError):
        executor.submit(steps.plan([0], [0], [1], admitted=[steps.admit(0, [1], GREEDY)]))


def test_warm_up_fits_into_the_smallest_engine(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    for pages, length in ((1, 2), (1, 3), (1, 16), (2, 32)):
        runner, _ = open_runner(
            tiny_qwen3, tiny_drafter, num_pages=pages, max_model_len=length, max_num_seqs=1
        )
        assert isinstance(runner, CpuModelRunner)
