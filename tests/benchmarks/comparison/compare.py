"""`benchmarks compare`: DFlash in Manta against other ways to decode the same target on this machine.

Plain decoding in Manta, Hugging Face `generate`, an unbatched DFlash loop, and any OpenAI-compatible server.
All contenders continue the same token ids greedily by the same number of tokens, in their fastest
configuration, found by short trials. Contenders alternate (`turns.py`); medians over rounds are reported.
Outputs are compared with those of `generate` in fp32, one prompt at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from manta.actors.llm import LLM
from manta.actors.system.atomic_files import rounded
from manta.actors.system.host_resources import owned_cores
from manta.actors.targets.loading.resolved_config import ResolvedConfig, resolve_config
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.request.request import SamplingParams
from manta.jobs.bench.common.engine_passes import (
    MODES,
    Figures,
    Pass,
    encode_prompts,
    open_engines,
    prompts_per_turn,
    ratios,
    read_prompts,
    record,
    run_engine,
    run_rounds,
    say,
    split_evenly,
    tried_dtypes,
)
from manta.jobs.bench.common.idle_check import print_warning
from manta.jobs.common.tables import decimals, print_table

from ..options import CompareOptions
from ..processes.process_tree import TreeWatch
from .contender_server import OpenAIServer
from .contenders import (
    Contender,
    ContenderSetup,
    DFlashLoop,
    HuggingFaceGenerate,
    Prompts,
    Runner,
    TransformersTarget,
)

NAMES = {"on": "Manta, DFlash", "off": "Manta, plain"}
WARM_UP_TOKENS = 4
TRIAL_TOKENS = 32
TRIAL_PROMPTS = 2


def run_compare(config: EngineConfig, options: CompareOptions) -> Figures:
    """Measure, print a table per concurrency, write the figures if requested, and return them."""
    if config.speculative_config is None:
        raise ConfigError(
            "speculative_config is missing: compare measures decoding with a drafter. Give --spec-model.",
            param="speculative_config",
        )
    rows = read_prompts(options.prompts, options.num_prompts)
    servers = [OpenAIServer(options.server, options.server_model)] if options.server else []
    resolved = resolve_config(config)
    prompts = [token_ids for _, token_ids in encode_prompts(rows, load_tokenizer(config))]
    num_threads = config.num_threads or owned_cores()
    torch.set_num_threads(num_threads)
    generate, loop = _transformers_contenders(resolved, tried_dtypes(config))
    say("the reference: Hugging Face generate in float32, one prompt at a time")
    reference = generate.reference(prompts, options.max_tokens)
    points: list[Figures] = []
    for requests in options.concurrency:
        with open_engines(config, requests, tried_dtypes(config)) as engines:
            ours = [EngineContender(NAMES[mode], _of_mode(engines, mode)) for mode in MODES]
            contenders: list[Contender] = [*ours, generate, loop, *servers]
            sides = [_Side(contender, requests, num_threads) for contender in contenders]
            points.append(_measure(sides, prompts, reference, requests, options))
        print_point(points[-1])
    return record(config, options, points)


class EngineContender:
    """Our engine, one per dtype."""

    def __init__(self, name: str, engines: Mapping[str, LLM]) -> None:
        self.name, self._engines = name, engines

    def setups(self, requests: int) -> Mapping[ContenderSetup, Runner]:
        return {
            ContenderSetup(dtype, requests): partial(self._run, llm) for dtype, llm in self._engines.items()
        }

    def _run(self, llm: LLM, prompts: Prompts, max_tokens: int) -> Pass:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return run_engine(llm, prompts, [params] * len(prompts))


class _Side:
    """A contender in one comparison: its configuration and its passes."""

    def __init__(self, contender: Contender, requests: int, num_threads: int) -> None:
        self.name = contender.name
        self._here = not isinstance(contender, OpenAIServer)
        self._num_threads = num_threads
        self._setups = contender.setups(requests)
        self._setup = next(iter(self._setups))
        self._trial: dict[ContenderSetup, float] = {}
        self.passes: list[Pass] = []

    def choose_way(self, prompts: Prompts, max_tokens: int) -> None:
        """Try all configurations, select the fastest, and warm it up at full length."""
        torch.set_num_threads(self._num_threads)  # equal for all; Manta's engines set theirs at every step
        for setup, run in self._setups.items():
            say(f"{self.name}: {setup}")
            run(prompts[: setup.at_once], min(WARM_UP_TOKENS, max_tokens))
            trial = run(prompts[: max(TRIAL_PROMPTS, setup.at_once)], min(TRIAL_TOKENS, max_tokens))
            self._trial[setup] = trial.tokens_per_s
        self._setup = max(self._trial, key=lambda setup: self._trial[setup])
        self._setups[self._setup](prompts[: self._setup.at_once], max_tokens)

    def take_turn(self, prompts: Prompts, max_tokens: int, watch: TreeWatch, turn: slice) -> Pass:
        """Run a turn; watched unless a server does the work, which would count as other processes."""
        torch.set_num_threads(self._num_threads)
        with watch.open() if self._here else nullcontext():
            return self._setups[self._setup](prompts[turn], max_tokens)

    @property
    def trial_tokens_per_s(self) -> float:
        return self._trial[self._setup]

    def figures(self, first: _Side, reference: list[list[int]]) -> Figures:
        last = self.passes[-1]
        same = None if last.token_ids is None else _num_equal(last.token_ids, reference)
        return {
            "name": self.name,
            "dtype": self._setup.dtype,
            "at_once": self._setup.at_once,
            "detail": self._setup.detail,
            "tokens_per_s": round(statistics.median(p.tokens_per_s for p in self.passes), 2),
            "rounds_tokens_per_s": [round(p.tokens_per_s, 2) for p in self.passes],
            "tokens": last.tokens,
            "mean_acceptance_length": rounded(last.mean_acceptance_length),
            "ratio": round(statistics.median(ratios(first.passes, self.passes)), 3),
            "identical": None if same is None else same == len(reference),
            "identical_prompts": same,
            "trial_tokens_per_s": {str(setup): round(speed, 1) for setup, speed in self._trial.items()},
        }


def _measure(
    sides: Sequence[_Side],
    prompts: Prompts,
    reference: list[list[int]],
    requests: int,
    options: CompareOptions,
) -> Figures:
    """Measure all contenders at one concurrency; the others are compared with the first."""
    for side in sides:
        side.choose_way(prompts, options.max_tokens)
    slowest = min(side.trial_tokens_per_s for side in sides)
    turns = split_evenly(len(prompts), prompts_per_turn(requests, slowest, options.max_tokens), requests)
    watch = TreeWatch()
    passes = run_rounds(
        {side.name: partial(side.take_turn, prompts, options.max_tokens, watch) for side in sides},
        turns,
        options.rounds,
        f"{requests} request(s)",
    )
    for side in sides:
        side.passes = passes[side.name]
    return {
        "requests": requests,
        "prompts": len(prompts),
        "tokens": len(prompts) * options.max_tokens,
        "turns": len(turns),
        "contenders": [side.figures(sides[0], reference) for side in sides],
        "idleness": watch.found.as_json(),
    }


def print_point(point: Figures) -> None:
    """Print the table of one concurrency, missing tokens, and a warning if the machine was not idle."""
    columns = ["contender", "dtype", "how", "tok/s", "mean acceptance length", "DFlash is", "identical"]
    rows = [
        [
            side["name"],
            side["dtype"] or "-",
            str(ContenderSetup(None, side["at_once"], side["detail"])),
            f"{side['tokens_per_s']:.1f}",
            decimals(side["mean_acceptance_length"]),
            f"{side['ratio']:.2f}x",
            _identical(side, point["prompts"]),
        ]
        for side in point["contenders"]
    ]
    print_table(f"{point['requests']} request(s), {point['prompts']} prompts", columns, rows)
    for side in point["contenders"]:
        if side["tokens"] != point["tokens"]:
            print(
                f"{side['name']} returned {side['tokens']} of {point['tokens']} tokens; "
                "tokens/s counts the returned ones."
            )
    print_warning([point["idleness"]])


def _identical(side: Figures, prompts: int) -> str:
    if side["identical"] is None:
        return "-"
    return "yes" if side["identical"] else f"no ({side['identical_prompts']} of {prompts})"


def _num_equal(answers: list[list[int]], reference: list[list[int]]) -> int:
    return sum(ours == theirs for ours, theirs in zip(answers, reference, strict=True))


def _transformers_contenders(
    resolved: ResolvedConfig, dtypes: Sequence[str]
) -> tuple[HuggingFaceGenerate, DFlashLoop]:
    assert resolved.drafter_folder is not None, "run_compare checks that there is a drafter"
    target = TransformersTarget(resolved.target_folder, resolved.device)
    return HuggingFaceGenerate(target, dtypes), DFlashLoop(target, resolved.drafter_folder, dtypes)


def _of_mode(engines: Mapping[tuple[str, str], LLM], mode: str) -> dict[str, LLM]:
    return {dtype: llm for (of, dtype), llm in engines.items() if of == mode}
