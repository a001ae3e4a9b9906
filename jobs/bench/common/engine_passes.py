"""Prompts, engines and passes over the prompts, shared by the benchmarks, and the alternation of their sides.

In a *round* every side answers all prompts; a *turn* is one side's run over a few of them and takes some
tenths of a second. All sides answer the same prompts in consecutive turns, in rotating order, so that
disturbances of the machine affect all of them. The figures of a round are sums over its turns, so the speeds
of two sides in a round, and their ratio, are for the same work at nearly the same time. Medians are taken
over rounds. Also used by `tests/benchmarks/`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from ....actors.batch.dataset.row_requests import Record, RowSchema, category_of, parse_line, row_id, row_seed
from ....actors.batch.dataset.source import open_source
from ....actors.checkpoints.checkpoint_paths import shipped
from ....actors.engine.outputs import RequestOutput
from ....actors.llm import LLM
from ....actors.system.atomic_files import write_json
from ....actors.system.wait_messages import counting, say
from ....actors.tokenization.prompts import Chat, encode_prompt
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.config import EngineConfig
from ....cluster.errors import DatasetError, RequestError
from ....cluster.request.request import SamplingParams
from ....cluster.speculation.acceptance_length import mean_acceptance_length
from ...common.generate import open_llm
from .options import RunOptions
from .provenance import options_json, provenance

MODES = ("on", "off")
Figures = dict[str, Any]  # Any: JSON
Prompt = tuple[str, list[int]]  # id, token ids
SLICE_S = 0.5  # duration for the slowest side
# Minimum number of full batches in a turn: at its end the batch is not full, which must not dominate.
MIN_GROUPS = 2

_Name = TypeVar("_Name", bound=str)


@dataclass
class Pass:
    """Result of one pass over prompts; `token_ids` of the answers are None if a server does not send them."""

    seconds: float
    tokens: int
    token_ids: list[list[int]] | None = field(repr=False)

    def __add__(self, more: Self) -> Self:
        both = self.token_ids is not None and more.token_ids is not None
        return replace(
            self,
            seconds=self.seconds + more.seconds,
            tokens=self.tokens + more.tokens,
            token_ids=[*self.token_ids, *more.token_ids] if both else None,  # type: ignore[misc]
        )

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_acceptance_length(self) -> float | None:
        return None


@dataclass
class SteppedPass(Pass):
    """A pass that counted its verify steps; `step_seconds` by part of the step, empty for other engines."""

    num_steps: int
    num_accepted: int
    step_seconds: dict[str, float] = field(default_factory=dict)

    def __add__(self, more: Self) -> Self:  # type: ignore[override]  # passes of one kind are added
        parts = [*self.step_seconds, *(part for part in more.step_seconds if part not in self.step_seconds)]
        return replace(
            super().__add__(more),
            num_steps=self.num_steps + more.num_steps,
            num_accepted=self.num_accepted + more.num_accepted,
            step_seconds={
                part: self.step_seconds.get(part, 0.0) + more.step_seconds.get(part, 0.0) for part in parts
            },
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        return mean_acceptance_length(self.num_steps, self.num_accepted)


_Pass = TypeVar("_Pass", bound=Pass)


class PromptRow(NamedTuple):
    """A line of a prompt file. `prompt` is text or a `Chat`; `category` is "all" if the line names none."""

    name: str
    category: str
    prompt: Any  # content of the user's file


def read_prompts(path: Path, count: int) -> list[tuple[str, Any]]:
    return [(row.name, row.prompt) for row in read_rows(path, count)]


def read_rows(path: Path, count: int | None = None) -> list[PromptRow]:
    """Return `count` lines, taken evenly from the file, with their categories; all if None."""
    path = shipped(path)
    if not path.exists():
        raise DatasetError(
            f"prompts: {path} does not exist. Give a JSONL file with --prompts.",
            param="prompts",
        )
    source = open_source([path])
    if not source.lines:
        raise DatasetError(f"prompts: {path} must be a JSONL file.", param="prompts")
    lines: list[bytes] = []
    for file in source.files:
        with file.reading(), file.open_text("jsonl") as text:
            lines += [line for _, line in text.raw_records() if isinstance(line, bytes)]
    some = len(lines) if count is None else min(count, len(lines))
    records = [_record(path, lines, i * len(lines) // some) for i in range(some)]
    row_schema = RowSchema(category_column="category")
    return [
        PromptRow(
            row_id(record, row_schema), category_of(record, row_schema) or "all", _prompt_of(record, path)
        )
        for record in records
    ]


def _record(path: Path, lines: Sequence[bytes], index: int) -> Record:
    try:
        return parse_line(lines[index])
    except RequestError as error:
        raise DatasetError(f"prompts: {path}, row {index + 1}: {error.message}", param="prompts") from None


def encode_prompts(rows: Sequence[tuple[str, Any]], tokenizer: Tokenizer | None) -> list[Prompt]:
    return [(name, list(encode_prompt(prompt, tokenizer).token_ids)) for name, prompt in rows]


def joined(passes: Sequence[_Pass]) -> _Pass:
    return reduce(operator.add, passes)


@contextmanager
def open_engines(
    config: EngineConfig, requests: int, dtypes: Sequence[str]
) -> Iterator[dict[tuple[str, str], LLM]]:
    """Open one engine per mode and dtype, with `max_num_seqs=requests` and without a prefix cache.

    Each counts the GPU memory that the others use, so the nth may use n shares of `gpu_memory_utilization`.
    """
    engines: dict[tuple[str, str], LLM] = {}
    kinds = [(mode, dtype) for dtype in dtypes for mode in MODES]
    try:
        for number, (mode, dtype) in enumerate(kinds, 1):
            of_mode = config if mode == "on" else replace(config, speculative_config=None)
            engines[mode, dtype] = open_llm(
                replace(
                    of_mode,
                    dtype=dtype,  # type: ignore[arg-type]
                    max_num_seqs=requests,
                    enable_prefix_caching=False,
                    gpu_memory_utilization=config.gpu_memory_utilization * number / len(kinds),
                )
            )
        yield engines
    finally:
        for llm in engines.values():
            llm.close()


def tried_dtypes(config: EngineConfig) -> tuple[str, ...]:
    """Return the configured dtype; for "auto" the candidates to measure (on a GPU only bfloat16)."""
    import torch

    if config.dtype != "auto":
        return (config.dtype,)
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return ("bfloat16",) if on_gpu else ("float32", "bfloat16")


class EnginePass:
    """Prompts and sampling parameters for one engine; a call runs a slice. Ids determine the seeds."""

    def __init__(
        self, llm: LLM, prompts: Sequence[Prompt], max_tokens: int, temperature: float = 0.0
    ) -> None:
        self._llm = llm
        self._prompts = [token_ids for _, token_ids in prompts]
        self._params = [
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=row_seed(0, name)
            )
            for name, _ in prompts
        ]

    def __call__(self, part: slice = slice(None)) -> SteppedPass:
        return run_engine(self._llm, self._prompts[part], self._params[part])


def run_engine(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> SteppedPass:
    before = llm.stats()
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin_s
    after = llm.stats()
    return SteppedPass(
        seconds=seconds,
        tokens=sum(len(_answer(output)) for output in outputs),
        token_ids=[_answer(output) for output in outputs],
        num_steps=sum(output.metrics.num_steps for output in outputs),
        num_accepted=sum(output.metrics.num_accepted_tokens for output in outputs),
        step_seconds={
            part: spent - before.step_seconds.get(part, 0.0) for part, spent in after.step_seconds.items()
        },
    )


def record(
    config: EngineConfig, options: RunOptions, points: list[Figures], more: Figures | None = None
) -> Figures:
    """Return the figures of a run (points, `more`, provenance); write them if the options name a file."""
    figures = {**subject(config, options), **(more or {}), "points": points}
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, figures)
    return figures


def subject(config: EngineConfig, options: RunOptions) -> Figures:
    return {
        "provenance": provenance(),
        "engine": asdict(config),
        "options": options_json(options),
    }


def _prompt_of(record: Mapping[str, Any], path: Path) -> Any:
    prompt = record.get("messages") or record.get("prompt")
    if not prompt:
        raise DatasetError(
            f"prompts: a line of {path} has neither `prompt` nor `messages`; it has: {', '.join(record)}.",
            param="prompts",
        )
    return Chat(prompt) if isinstance(prompt, list) and isinstance(prompt[0], Mapping) else prompt


def _answer(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def prompts_per_turn(requests: int, tokens_per_s: float, max_tokens: int) -> int:
    """Return the prompts that the slowest side answers in `SLICE_S`: at least two groups of `requests`."""
    groups = round(SLICE_S * tokens_per_s / max_tokens / requests)
    return requests * max(groups, MIN_GROUPS)


def split_evenly(count: int, per_turn: int, requests: int) -> list[slice]:
    """Split `count` prompts into turns of at least `per_turn`; all but the last are whole groups."""
    num_turns = max(count // per_turn, 1)
    groups = -(-count // requests)
    ends = [min(count, i * groups // num_turns * requests) for i in range(1, num_turns + 1)]
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def run_rounds(
    sides: Mapping[str, Callable[[slice], _Pass]], turns: Sequence[slice], rounds: int, title: str
) -> dict[str, list[_Pass]]:
    passes: dict[str, list[_Pass]] = {name: [] for name in sides}
    for number in range(rounds):
        done: dict[str, list[_Pass]] = {name: [] for name in sides}
        with counting(f"{title}, round {number + 1}/{rounds}", say):
            for i, turn in enumerate(turns):
                for name in rotated(list(sides), number + i):
                    done[name].append(sides[name](turn))
        for name, parts in done.items():
            passes[name].append(joined(parts))
    return passes


def rotated(names: Sequence[_Name], number: int) -> list[_Name]:
    first = number % len(names)
    return [*names[first:], *names[:first]]


def ratios(ours: Sequence[Pass], theirs: Sequence[Pass]) -> list[float]:
    return [mine.tokens_per_s / other.tokens_per_s for mine, other in zip(ours, theirs, strict=True)]
