"""Engines on the device under test beside the host's: outputs, and steps of both runners compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from manta import SamplingParams
from manta.actors.engine.outputs import RequestOutput
from manta.actors.llm import LLM
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.actors.targets.runners.gpu_runner import GpuModelRunner
from manta.cluster.engine.engine_stats import EngineStats
from manta.cluster.request.logprobs import StepLogprobs
from manta.cluster.step.scheduler_output import StepResult, TreeOutcome, TreeShape, Trim

from support.checkpoints.tiny import TINY_VOCAB
from support.engines.devices import DEVICE
from support.engines.steps import Steps, open_runner, short_warm_up
from support.engines.waits import counting_waits
from support.oracles.sampling_cases import KNOBS, tokens_of

# Few and short, for the interpreter takes seconds for a step: two without filters, one with all of them.
KNOB_NAMES = ("greedy", "plain", "all")
CASES = [
    np.random.default_rng(i).integers(1, TINY_VOCAB - 1, length).tolist()
    for i, length in enumerate((15, 14, 3))
]
PLACE = {"device": DEVICE.type, "page_size": 16}  # so small that short sequences have several pages
# Few heads: each is a program of the interpreter's.
SMALL_STATES = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 4}
PARAMS = [replace(KNOBS[name], seed=7 + i, max_tokens=3 + i) for i, name in enumerate(KNOB_NAMES)]


def outputs(
    target: Path, drafter: Path | None, backend: str, params: list[SamplingParams] = PARAMS, **changes: object
) -> list[RequestOutput]:
    with opened(target, drafter, backend, **changes) as llm:
        return llm.generate([{"prompt_token_ids": case} for case in CASES], params)


def generate(
    target: Path, drafter: Path | None, backend: str, params: list[SamplingParams] = PARAMS, **changes: object
) -> tuple[list[list[int]], EngineStats]:
    with opened(target, drafter, backend, **changes) as llm:
        return tokens_of(llm, CASES, params), llm.stats()


def opened(target: Path, drafter: Path | None, backend: str, **changes: object) -> LLM:
    spec = None
    if drafter is not None:
        spec = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    small = {"max_num_seqs": 3, "max_model_len": 48, "dtype": "float32", "num_threads": 1}
    settings = {"speculative_config": spec, **small, **PLACE, **changes}
    with short_warm_up():
        return LLM(str(target), skip_tokenizer_init=True, attention_backend=backend, **settings)


def same_logprobs(ours: StepLogprobs | None, theirs: StepLogprobs | None, counts: np.ndarray) -> None:
    """Compare the common rows of each request: rows of rejected drafts have no meaning, and the device trims
    some without the host's knowledge."""
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    assert ours.requests_A.tolist() == theirs.requests_A.tolist()
    assert (ours.counts_A >= theirs.counts_A).all()
    num_top = theirs.rows.top_ids_YL.shape[1]
    for place, count in zip(ours.requests_A.tolist(), ours.counts_A.tolist(), strict=True):
        mine, others = (each.of(place, min(count, int(counts[place])), num_top) for each in (ours, theirs))
        assert mine.ranks_Y.tolist() == others.ranks_Y.tolist()
        assert mine.top_ids_YL.tolist() == others.top_ids_YL.tolist()
        np.testing.assert_allclose(mine.logprobs_Y, others.logprobs_Y, atol=1e-4)
        np.testing.assert_allclose(mine.top_logprobs_YL, others.top_logprobs_YL, atol=1e-4)


def same_trees(ours: TreeOutcome | None, theirs: TreeOutcome | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    width = theirs.ranks_RW.shape[1]
    assert ours.ranks_RW[:, :width].tolist() == theirs.ranks_RW.tolist()
    for name in ("num_main_drafts_R", "num_main_accepted_R", "depths_R", "widths_R", "accepted_F"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
    np.testing.assert_allclose(ours.expected_F, theirs.expected_F, rtol=1e-3, atol=1e-4)


@dataclass
class Twins:
    """Runs the same steps on the device's and the host's runner and compares the results."""

    device: GpuModelRunner
    host: CpuModelRunner
    steps: Steps
    known: list[list[int]]  # tokens of each slot

    @classmethod
    def open(cls, target: Path, drafter: Path | None, prompts: list[list[int]], **how: Any) -> Twins:
        how |= {"model": str(drafter)} if drafter else {}
        spec = {"num_speculative_tokens": 3, "adaptive": False, **how}
        small = {"speculative_config": spec, "max_num_seqs": 6, "max_model_len": 48, "num_pages": 64, **PLACE}
        with short_warm_up():
            (device, info), (host, _) = (
                open_runner(target, attention_backend=backend, **small) for backend in ("triton", "torch")
            )
        assert isinstance(device, GpuModelRunner)
        steps = Steps(len(prompts), 48, num_groups=len(info.page_groups))
        return cls(device, host, steps, [list(prompt) for prompt in prompts])

    def run(
        self,
        computed: list[int],
        rows: list[int],
        drafts: list[int],
        *,
        trim: Trim | None = None,
        tree: TreeShape | None = None,
        writes_context: bool = True,
        waits: bool = False,
        **how: Any,
    ) -> StepResult:
        """A step of slots 0, 1, ..; the device is not given positions that it tracks itself.

        `waits`: whether the device may wait for the host.
        """
        slots = list(range(len(rows)))
        plan = self.steps.plan(slots, computed, rows, drafts, **how)
        plan = replace(plan, trim=trim, tree=tree, writes_context=writes_context)
        of_host = trim
        if trim is not None and trim.num_rows is not None:  # one pass, prompts' rows among them
            others = plan.num_rows[(plan.num_rows > plan.num_drafts + 1) | ~plan.samples].sum()
            of_host = replace(trim, num_rows=trim.num_rows + int(others))
        expected = self.host.execute(replace(plan, trim=of_host))
        unknown = np.where(plan.num_drafts > 0, np.int32(-1), plan.num_computed)
        with counting_waits() as counted:
            self.device.submit(replace(plan, num_computed=unknown))
        assert waits or counted == []
        result = self.device.collect()
        assert result.token_ids.tolist() == expected.token_ids.tolist()
        assert result.num_tokens.tolist() == expected.num_tokens.tolist()
        assert result.is_pass_skipped == expected.is_pass_skipped
        assert (result.is_copied is None) == (expected.is_copied is None)
        if result.is_copied is not None and expected.is_copied is not None:
            assert result.is_copied.tolist() == expected.is_copied.tolist()
        assert (result.margins is None) == (expected.margins is None)
        if result.margins is not None and expected.margins is not None:
            np.testing.assert_allclose(result.margins, expected.margins, rtol=1e-3, atol=1e-3)
        same_trees(result.trees, expected.trees)
        if trim is not None or tree is not None:
            assert result.num_drafts is not None and expected.num_drafts is not None
            assert result.num_drafts.tolist() == expected.num_drafts.tolist()
        same_logprobs(result.logprobs, expected.logprobs, result.num_tokens)
        same_logprobs(result.prompt_logprobs, expected.prompt_logprobs, np.full(len(rows), 99))
        for known, row in zip(self.known, result.token_ids, strict=False):
            known += row[row >= 0].tolist()
        return result

    def computed(self) -> list[int]:
        """A step of requests that lack only their newest token."""
        return [len(known) - 1 for known in self.known]
