"""The simulated engines, every method in every layout that fits the node, and their requests' lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...cluster.config import EngineConfig, SpeculativeConfig
from ...cluster.errors import ConfigError, PlacementError
from ...cluster.hardware.gpu_specs import Gpu
from ...cluster.hardware.memory_estimate import MemoryEstimate, estimate_memory
from ...cluster.hardware.model_pair import LayoutDemand, ModelPair
from ...cluster.hardware.parallel_layouts import ParallelLayout
from ...cluster.hardware.step_time import StepTimes
from ...cluster.request.request import Request
from ...cluster.simulation.acceptance_mix import AcceptanceMix
from ...cluster.simulation.load_driver import LoadDriver
from ...cluster.simulation.simulated_engine import PlanCost, simulated_engine, simulated_request
from ..common.options import check_least
from ..plan.pair_reader import ReadPair, read_pair
from .methods import Method, parse_acceptance


@dataclass(frozen=True, slots=True)
class DraftAssumptions:
    """Acceptance of the drafters (`parse_acceptance`), and spread and seed of requests' hardness."""

    dflash: str = "4.0"
    eagle3: str = "3.0"
    eagle3_drafts: int = 7
    spread: float = 0.5
    seed: int = 0

    def texts(self, method: Method, num_drafts: int) -> AcceptanceMix:
        """Return the acceptance model of a method; the DFlash drafter makes `num_drafts` drafts."""
        eagle3 = method.kind == "eagle3"
        drafts, stated = (self.eagle3_drafts, self.eagle3) if eagle3 else (num_drafts, self.dflash)
        if method.kind == "plain" or not drafts:
            return AcceptanceMix(())
        survival, lengths = parse_acceptance(stated, drafts)
        return AcceptanceMix(survival, self.spread, lengths, self.seed)


@dataclass(frozen=True, slots=True)
class NodeEngine:
    method: Method
    texts: AcceptanceMix
    pair: ModelPair
    layout: ParallelLayout
    memory: MemoryEstimate
    demand: LayoutDemand
    times: StepTimes

    def engine(self, *, free_prompts: bool = False, prefix_caching: bool = False) -> LoadDriver:
        return simulated_engine(
            self.pair,
            self.memory,
            self.demand,
            PlanCost(self.times, free_prompts=free_prompts),
            adaptive=self.method.adaptive,
            draft_shape=self.method.draft_shape,
            prefix_caching=prefix_caching,
            hardness=self.texts.hardness,
        )


def read_shapes(model: str, drafter: str | None, max_model_len: int | None) -> ReadPair:
    spec = None if drafter is None else SpeculativeConfig(model=drafter)
    return read_pair(EngineConfig(model=model, speculative_config=spec, max_model_len=max_model_len), None)


def node_engines(
    pair: ModelPair,
    gpu: Gpu,
    num_gpus: int,
    tp_sizes: Sequence[int],
    methods: Sequence[Method],
    drafting: DraftAssumptions,
    workload: Workload,
) -> Iterator[NodeEngine]:
    """Yield every method with every number of ranks that fits; PlacementError if one fits with none."""
    demand = LayoutDemand(max_model_len=workload.max_tokens, context=workload.mean_tokens)
    for method in methods:
        texts = drafting.texts(method, pair.num_drafts)
        mine, lacking, count = method.pair(pair, texts), list[PlacementError](), 0
        extra = int(method.placement == "split")  # GPUs of an engine beside its ranks
        for tp in [tp for tp in tp_sizes or pair.tp_sizes if tp + extra <= num_gpus]:
            layout = ParallelLayout(tp, method.placement, num_gpus // (tp + extra))
            try:
                memory = estimate_memory(mine, gpu, layout, demand)
            except PlacementError as error:
                lacking.append(error)
                continue
            count += 1
            yield NodeEngine(method, texts, mine, layout, memory, demand, StepTimes(mine, gpu, layout))
        if lacking and not count:
            raise lacking[-1]
        if not count:
            raise ConfigError(f"tp={list(tp_sizes)}: the node has {num_gpus} GPUs.", param="tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lognormal lengths of prompts and answers, cut at `max_tokens`, or those of a trace, cyclically."""

    prompt_tokens: float = 1024.0
    output_tokens: float = 512.0
    sigma: float = 0.4
    max_tokens: int = 131_072
    seed: int = 0
    trace: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_least(self, 1, "prompt_tokens", "output_tokens")
        if self.prompt_tokens + self.output_tokens > self.max_tokens:
            raise ConfigError(
                f"prompt_tokens + output_tokens = {self.prompt_tokens + self.output_tokens:g} exceeds "
                f"max_model_len={self.max_tokens}.",
                param="prompt_tokens",
            )

    @property
    def mean_tokens(self) -> int:
        if self.trace:
            return round(sum(map(sum, self.trace)) / len(self.trace))
        return round(self.prompt_tokens + self.output_tokens)

    def lengths(self, number: int) -> tuple[int, int]:
        if self.trace:
            return self.trace[number % len(self.trace)]
        dice = np.random.default_rng([self.seed, number])
        scale = np.exp(self.sigma * dice.standard_normal(2) - self.sigma**2 / 2.0)
        prompt = min(max(round(self.prompt_tokens * scale[0]), 1), self.max_tokens - 1)
        return prompt, min(max(round(self.output_tokens * scale[1]), 1), self.max_tokens - prompt)

    def request(self, number: int, share: float = 1.0) -> Request:
        """Make a request with `share` of its answer, for requests that are in progress at the start."""
        prompt, output = self.lengths(number)
        return simulated_request(number, prompt, max(round(share * output), 1))
