"""`benchmarks grammars`: the share of structured outputs in the time of a step.

Requests with schemas run in this process, without Ray. Both calls through which grammars enter a step are
timed: computing masks (`GrammarStates.constrain_drafts`) and applying them to logits
(`StepOperators.mask_tokens`).
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from manta.actors.system.atomic_files import write_json
from manta.actors.targets.loading.load_plan import plan_load
from manta.actors.targets.loading.operator_factory import make_grammars, make_step_operators
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.request.request import SamplingParams
from manta.cluster.request.structured_outputs import StructuredOutputsParams
from manta.drafter.grammars.matchers import GrammarStates
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.generate import open_llm

from ..options import GrammarOptions

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


def run_grammars(config: EngineConfig, options: GrammarOptions) -> dict[str, float]:
    """Measure, print, write the figures if requested, and return them."""
    requested = [
        StructuredOutputsParams(json=SCHEMAS[i % len(SCHEMAS)], disable_any_whitespace=True)
        for i in range(options.requests)
    ]
    plan = plan_load(config)
    if make_grammars(plan) is None:
        raise ConfigError("model: it has no tokenizer or no end-of-sequence token.", param="model")
    doors: list[tuple[type, str]] = [
        (GrammarStates, "constrain_drafts"),
        (type(make_step_operators(plan)), "mask_tokens"),
    ]
    rounds = _rounds(config, requested, options, doors)
    figures = {
        "step_ms": statistics.median(each.step_s for each in rounds) * 1e3,
        "grammars_ms": statistics.median(each.grammars_s for each in rounds) * 1e3,
        "share": statistics.median(each.grammars_s / each.step_s for each in rounds),
        "mean_acceptance_length": rounds[0].mean_acceptance_length,
    }
    print(
        f"{options.requests} requests with schemas: a step takes {figures['step_ms']:.2f} ms, of which "
        f"grammars {figures['grammars_ms']:.2f} ms ({figures['share']:.1%}); "
        f"{figures['mean_acceptance_length']:.2f} tokens per verify"
    )
    if options.output is not None:
        write_json(options.output, {"figures": figures, "provenance": provenance()})
    return figures


@dataclass(frozen=True, slots=True)
class _Round:
    """Means over the steps of one round of all requests."""

    step_s: float
    grammars_s: float
    mean_acceptance_length: float


def _rounds(
    config: EngineConfig,
    requested: list[StructuredOutputsParams],
    options: GrammarOptions,
    doors: list[tuple[type, str]],
) -> list[_Round]:
    params = [
        SamplingParams(max_tokens=options.max_tokens, seed=i, structured_outputs=a)
        for i, a in enumerate(requested)
    ]
    prompts = [f"Make up example {i} as JSON:" for i in range(len(requested))]
    rounds: list[_Round] = []
    with open_llm(config) as llm, ExitStack() as clocks:
        llm.generate(prompts, params, use_tqdm=False)  # warm-up: compiles loops and lexer states
        clock = [clocks.enter_context(_clocked(kind, name)) for kind, name in doors]
        for _ in range(options.rounds):
            before, spent, begin_s = llm.stats().steps, sum(map(sum, clock)), time.perf_counter()
            answers = llm.generate(prompts, params, use_tqdm=False)
            seconds, steps = time.perf_counter() - begin_s, llm.stats().steps - before
            length = statistics.mean(a.metrics.mean_acceptance_length or 1.0 for a in answers)
            rounds.append(_Round(seconds / steps, (sum(map(sum, clock)) - spent) / steps, length))
    return rounds


@contextmanager
def _clocked(kind: type, name: str) -> Iterator[list[float]]:
    """Record the seconds of each call of a method within the `with` block."""
    seconds: list[float] = []
    original = inspect.getattr_static(kind, name)
    call = getattr(kind, name)

    def timed(*args: Any, **kwargs: Any) -> Any:  # Any: arguments and result of the method
        begin_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin_s)

    setattr(kind, name, staticmethod(timed) if isinstance(original, staticmethod) else timed)
    try:
        yield seconds
    finally:
        setattr(kind, name, original)
