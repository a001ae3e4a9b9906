"""`manta bench grammars`: what holding answers to schemas costs of a step.

Requests with schemas run to their end; then their steps are played again without the model: the same tokens
stand, what comes next is drafted, and the walk, the masks and their application to logits are timed. What is
told is their share of the engine's own steps. In this process, without Ray.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...actors.files import write_json
from ...actors.grammars import grammar_of
from ...actors.outputs import RequestOutput
from ...actors.targets.loading.grammars import make_grammars
from ...actors.targets.loading.operators import make_step_operators
from ...actors.targets.loading.plan import plan_load
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ...cluster.grammar import SlotGrammar, StructuredOutputsParams
from ...cluster.request import SamplingParams
from ...drafter.grammars.states import GrammarStates
from ...drafter.step.operators import StepOperators
from ..generate import open_llm
from .provenance import provenance

_TEXT = {"type": "string", "maxLength": 200}
_PERSON = {
    "type": "object",
    "properties": {"name": _TEXT, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SCHEMAS: tuple[dict[str, Any], ...] = (  # Any: JSON
    _PERSON,
    {"type": "array", "items": _PERSON, "minItems": 3},
    {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "text": _TEXT}, "required": ["kind"]},
    {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 4},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """What is measured: so many requests at once, and tokens of each; figures go to `output`, as JSON."""

    requests: int = 8
    max_tokens: int = 128
    output: Path | None = None

    def __post_init__(self) -> None:
        for name in ("requests", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", param=name)


def run_grammars(config: EngineConfig, options: GrammarOptions) -> dict[str, float]:
    """Measure, print, and write the figures."""
    asked = [
        StructuredOutputsParams(json=SCHEMAS[i % len(SCHEMAS)], disable_any_whitespace=True)
        for i in range(options.requests)
    ]
    plan = plan_load(config)
    grammars = make_grammars(plan)
    if grammars is None:
        raise ConfigError("model: it has no tokenizer, or names no end-of-sequence token.", param="model")
    answers, step_s = _answers(config, asked, options.max_tokens)
    masks_s = _replay(grammars, make_step_operators(plan), asked, answers, plan.target.vocab_size)
    figures = {"step_ms": step_s * 1e3, "grammars_ms": masks_s * 1e3, "share": masks_s / step_s}
    print(
        f"{options.requests} requests with schemas: a step takes {figures['step_ms']:.2f} ms, of which "
        f"grammars {figures['grammars_ms']:.2f} ms ({figures['share']:.1%})"
    )
    if options.output is not None:
        write_json(options.output, {"figures": figures, "provenance": provenance()})
    return figures


def _answers(
    config: EngineConfig, asked: list[StructuredOutputsParams], max_tokens: int
) -> tuple[list[RequestOutput], float]:
    """Whole answers, and the seconds of a step."""
    params = [
        SamplingParams(max_tokens=max_tokens, seed=i, structured_outputs=a) for i, a in enumerate(asked)
    ]
    with open_llm(config) as llm:
        prompts = [f"Make up example {i} as JSON:" for i in range(len(asked))]
        llm.generate(prompts, params, use_tqdm=False)  # loops are compiled, states of the lexers made
        before, begin_s = llm.stats().steps, time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        return answers, (time.perf_counter() - begin_s) / (llm.stats().steps - before)


def _replay(
    grammars: GrammarStates,
    operators: StepOperators,
    asked: list[StructuredOutputsParams],
    answers: list[RequestOutput],
    vocab_size: int,
) -> float:
    """Median seconds of a step's share: every request drafts what it will say, and keeps what it kept."""
    tokens = [answer.outputs[0].token_ids for answer in answers]
    kept = max(1, round(statistics.mean(a.metrics.mean_acceptance_length or 1 for a in answers)))
    most = max(len(answer.metrics.acceptance_histogram) for answer in answers)
    for slot, each in enumerate(asked):
        grammars.admit(slot, SlotGrammar(grammar_of(each), prompt_length=0))
    seconds: list[float] = []
    for begin in range(0, min(map(len, tokens)), kept):
        drafts_RK = np.full((len(tokens), most), -1, dtype=np.int64)
        for row, own in enumerate(tokens):
            following = own[begin : begin + most]
            drafts_RK[row, : len(following)] = following
        slots_R = np.arange(len(tokens))
        logits_XV = torch.zeros(len(tokens) * (most + 1), vocab_size)
        begin_s = time.perf_counter()
        masks = grammars.guide(
            slots_R,
            np.full_like(slots_R, begin),
            np.full_like(slots_R, most + 1),
            drafts_RK,
            lambda slot, start, end: tokens[slot][start:end],
        )
        assert masks is not None, "every request has a grammar"
        operators.mask_tokens(logits_XV, masks)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)
