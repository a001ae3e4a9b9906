"""Compares a pair's answers token by token: speculation on with off, and Triton's kernels with PyTorch's.

Runs the engine in this process on token ids, without tokenizer and Ray. All tokens must be equal where a
row's bits do not depend on the other rows of its batch: in a CPU's own dtype, and in fp32, for which a GPU's
engine is batch-invariant here: its products for few rows add up in another order than those for many. In 16
bits on a GPU, two tokens may be exchanged where their logits are nearly equal: a difference passes if
PyTorch's operators in fp32 give both tokens nearly the same logit there. Called by `doctor_run.py`.

Legend: V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...actors.engine.uniproc_executor import InProcessExecutor
from ...actors.targets.loading.rank_loader import load_runner
from ...actors.targets.loading.resolved_config import ResolvedConfig
from ...actors.targets.runners.cpu_runner import CpuModelRunner
from ...cluster.config import EngineConfig
from ...cluster.engine.engine_core import EngineCore
from ...cluster.pages.kv_cache_groups import pages_for
from ...cluster.request.request import Request, SamplingParams
from ...cluster.step.dummy_steps import dummy_step
from .cases.checks import Check, CheckOutcome, NotHereError, none_differ

Answers = list[tuple[int, ...]]
MAX_LENGTH, _SEQUENCES = 256, 8  # tokens of a sequence; concurrent sequences
NO_GPU = "no GPU"
REMEDY = (
    "compare with `manta generate --no-speculation --attention-backend torch`, serve with flags that give "
    "the same output, and report the line (-o FILE)"
)
_NEAR_TIE = 0.25  # of a logit; bf16 changes those of the shipped pair by 0.15 at most, 0.02 on average
_SAMPLINGS = (
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=1.0, ignore_eos=True),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, ignore_eos=True),
)


@dataclass(frozen=True, slots=True)
class _Workload:
    prompts: Sequence[tuple[int, ...]]
    params: Sequence[SamplingParams]

    @classmethod
    def of(cls, vocab_size: int, count: int, max_tokens: int, *, greedy: bool = False) -> _Workload:
        """Make prompts of 5 to 83 token ids; end-of-sequence tokens are ignored."""
        prompts = [
            tuple((7 * i + j * j) % (vocab_size - 16) + 1 for j in range(5 + 13 * (i % 7)))
            for i in range(count)
        ]
        kinds = _SAMPLINGS[:1] if greedy else _SAMPLINGS
        params = [replace(kinds[i % len(kinds)], seed=i, max_tokens=max_tokens) for i in range(count)]
        return cls(prompts, params)


def settings_of(resolved: ResolvedConfig, **changes: object) -> EngineConfig:
    num_pages = _SEQUENCES * pages_for(MAX_LENGTH, resolved.page_size) * len(resolved.pages.groups)
    spec = resolved.config.speculative_config
    small = replace(
        resolved.config,
        speculative_config=None if spec is None else replace(spec, adaptive=False),
        max_num_seqs=_SEQUENCES,
        max_model_len=min(MAX_LENGTH, resolved.max_model_len),
        num_pages=num_pages,
        num_threads=1,  # PyTorch's threads wait for each other if another process uses a core
    )
    return replace(small, **changes)  # type: ignore[arg-type]


def pair_checks(resolved: ResolvedConfig, *, quick: bool) -> Iterator[Check]:
    on_gpu = resolved.device.type == "cuda"
    count, max_tokens = (4, 24) if quick or not on_gpu else (24, 100)
    for dtype in sorted({"float32", str(resolved.dtype).removeprefix("torch.")}, reverse=True):
        look = partial(_speculation, resolved, dtype, count, max_tokens)
        yield Check("pair", f"speculation on = off, {dtype}", look, REMEDY)
    yield Check("pair", "triton = torch, float32", partial(_backends, resolved, count, max_tokens), REMEDY)


def _speculation(resolved: ResolvedConfig, dtype: str, count: int, max_tokens: int) -> CheckOutcome:
    nearly = resolved.device.type == "cuda" and dtype != "float32"
    workload = _Workload.of(resolved.target.vocab_size, count, max_tokens, greedy=nearly)
    config = settings_of(resolved, dtype=dtype, batch_invariant=resolved.device.type == "cuda" and not nearly)
    drafted, num_drafted = _answers(config, workload)
    plain, _ = _answers(replace(config, speculative_config=None), workload)
    if not num_drafted:
        return CheckOutcome("nothing was drafted", "drafts", passed=False)
    if nearly:
        return _near_ties(resolved, workload, drafted, plain)
    return _equal(drafted, plain)


def _backends(resolved: ResolvedConfig, count: int, max_tokens: int) -> CheckOutcome:
    """Compare backends by plain decoding, since speculation would hide differences in the drafter."""
    if resolved.device.type != "cuda":
        raise NotHereError(NO_GPU)
    workload = _Workload.of(resolved.target.vocab_size, count, max_tokens)
    config = settings_of(resolved, dtype="float32", speculative_config=None)
    answers = [_answers(replace(config, attention_backend=name), workload)[0] for name in ("triton", "torch")]
    return _equal(*answers)


def _answers(config: EngineConfig, workload: _Workload) -> tuple[Answers, int]:
    engine = EngineCore(config, InProcessExecutor(config))
    found: dict[str, tuple[int, ...]] = {}
    try:
        for i, (prompt, params) in enumerate(zip(workload.prompts, workload.params, strict=True)):
            found[str(i)] = ()
            engine.add_request(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        while engine.has_unfinished:
            for update in engine.step():
                found[update.request_id] += update.token_ids
        return list(found.values()), engine.stats().num_draft_tokens
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()  # no-op without a GPU


def _equal(mine: Answers, theirs: Answers) -> CheckOutcome:
    differing = sum(a != b for a, b in zip(mine, theirs, strict=True))
    return none_differ(differing, len(mine), "answers")


def _near_ties(resolved: ResolvedConfig, workload: _Workload, mine: Answers, theirs: Answers) -> CheckOutcome:
    """Check the first difference of each greedy answer: the fp32 logits of both tokens must be close."""
    logits = _ExactLogits(resolved)
    gaps: list[float] = []
    for prompt, a, b in zip(workload.prompts, mine, theirs, strict=True):
        if a != b:
            at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
            gaps.append(logits.gap((*prompt, *a[:at]), a[at], b[at]))
    words = f"{len(gaps)} of {len(mine)} answers differ"
    if gaps:
        words += f", where two logits are within {max(gaps):.3f}"
    return CheckOutcome(words, f"near-ties, {_NEAR_TIE}", max(gaps, default=0.0) <= _NEAR_TIE)


class _ExactLogits:
    """Computes the target's logits with PyTorch's operators in fp32."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        exact = settings_of(resolved, dtype="float32", attention_backend="torch", speculative_config=None)
        runner, self._info = load_runner(exact)
        assert isinstance(runner, CpuModelRunner), "the torch backend uses the host runner"
        self._runner = runner

    def gap(self, tokens: tuple[int, ...], one: int, other: int) -> float:
        logits_V = self._logits_after(np.array(tokens, dtype=np.int32))
        return float((logits_V[one] - logits_V[other]).abs())

    @torch.inference_mode()
    def _logits_after(self, tokens: np.ndarray) -> Tensor:
        runner, count = self._runner, len(tokens)
        plan = dummy_step(
            [0],
            [count],
            [0],
            prompts=[tokens],
            num_pages=[pages_for(count, self._info.page_size)],
            groups=self._info.page_groups,
        )
        runner.states.apply(plan)
        rows = runner.states.lay_out_rows(plan)
        hidden_NH, _ = runner.model.forward(rows.token_ids_N, rows, runner.cache)
        return runner.model.logits(hidden_NH[-1:])[0].float()
