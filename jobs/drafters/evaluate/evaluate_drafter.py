"""`manta drafter eval`: measures a drafter's acceptance and its speed-up, in this process and without Ray.

*Acceptance* is a property of the drafter: every step drafts whole blocks, and answers stop at an
end-of-sequence token. *Speed* is what users get: the engine as it serves, with adaptive draft lengths,
alternating with plain decoding on the same prompts (`bench/sweep/`). `evaluation_card.py` writes the results;
`cluster/records/confidence_intervals.py` computes the confidence intervals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from ....actors.checkpoints.checkpoint_paths import shipped
from ....actors.engine.uniproc_executor import make_executor
from ....actors.system.atomic_files import rounded
from ....actors.tokenization.prompts import load_tokenizer
from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError, DatasetError, RequestError
from ....cluster.records.confidence_intervals import RatioEstimate, ratio_of_sums
from ....cluster.records.repetition import num_fresh_tokens
from ...bench.common.engine_passes import (
    Figures,
    PromptRow,
    prompts_per_turn,
    read_rows,
    rotated,
    say,
    split_evenly,
)
from ...bench.common.idle_check import Watch
from ...bench.common.provenance import options_json, provenance
from ...bench.common.request_source import RequestSource, encode_rows
from ...bench.sweep.engines import ADAPTIVE, PLAIN, Driver, open_sides
from ...bench.sweep.load_records import AnswerRecord, DraftBlock, LoadPass, Sums
from ...common.options import SHIPPED_CHATS, SHIPPED_PROMPTS
from ..common.drafter_files import method_of
from ..common.options import EvalOptions

OVERALL = "overall"
# Suites by name: a file of the package, and how many of its prompts are taken by default (None: all).
_SUITES: Mapping[str, tuple[Path, int | None]] = {
    "quick": (SHIPPED_PROMPTS, 40),
    "chats": (SHIPPED_CHATS, None),
}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a category.

    Attributes:
        tokens_per_step: tokens of a verified block, with the bonus token.
        by_position: share of blocks with a draft there that accept it.
        num_fresh_blocks, fresh_tokens_per_step: of the blocks that begin before their answer repeats itself
            (`cluster/records/repetition.py`).
    """

    num_prompts: int
    num_blocks: int
    num_fresh_blocks: int
    tokens_per_step: RatioEstimate
    fresh_tokens_per_step: RatioEstimate | None
    by_position: tuple[RatioEstimate, ...]

    def as_json(self) -> Figures:
        fresh = self.fresh_tokens_per_step
        return {
            "prompts": self.num_prompts,
            "blocks": self.num_blocks,
            "fresh_blocks": self.num_fresh_blocks,
            "tokens_per_step": self.tokens_per_step.as_json(),
            "fresh_tokens_per_step": None if fresh is None else fresh.as_json(),
            "by_position": [share.as_json() for share in self.by_position],
        }


def engine_of(drafter: str, target: str, settings: Mapping[str, Any] | None = None) -> EngineConfig:
    """Return the config of a pair, with more settings of its `speculative_config`."""
    speculation = {"model": drafter, "method": method_of(drafter), **(settings or {})}
    return EngineConfig.from_dict({"model": target, "speculative_config": speculation})


def run_eval(options: EvalOptions) -> Figures:
    suite = open_suite(options.suite, options.num_prompts)
    config = engine_of(options.drafter, options.target, options.speculative_config)
    config = replace(config, enable_prefix_caching=False, max_num_seqs=max(options.concurrency))
    kinds, count = suite_requests(config, suite, options.temperatures, options.max_tokens), len(suite.rows)
    drafts, acceptance = measure_suite(config, kinds, count)
    points = _measure_speed(config, kinds, count, options) if options.rounds else []
    return {
        "provenance": provenance(),
        "engine": asdict(config),
        "options": {**options_json(options), "prompts": str(suite.path), "num_prompts": count},
        "suite": {"name": suite.name, "prompts": count, **drafts},
        "acceptance": acceptance,
        "points": points,
    }


def _measure_speed(
    config: EngineConfig, kinds: Mapping[float, RequestSource], count: int, options: EvalOptions
) -> list[Figures]:
    with open_sides(config, {}, methods_only=True) as sides:
        if PLAIN in sides.refused:
            raise ConfigError(sides.refused[PLAIN], param="model")
        return [
            {
                "temperature": t,
                "requests": requests,
                **_speed(sides.drivers, source, count, requests, options),
            }
            for t, source in kinds.items()
            for requests in options.concurrency
        ]


def suite_requests(
    config: EngineConfig, suite: Suite, temperatures: Sequence[float], max_tokens: int
) -> dict[float, RequestSource]:
    rows = encode_rows(suite.rows, load_tokenizer(config))
    return {t: RequestSource(rows, max_tokens, t, natural=True) for t in temperatures}


def measure_suite(
    config: EngineConfig, kinds: Mapping[float, RequestSource], count: int
) -> tuple[Figures, list[Figures]]:
    """Return the size of whole blocks or trees, and acceptance by temperature, both as JSON for a card."""
    with open_full_length(config) as full_length:
        acceptance = [
            {
                "temperature": t,
                "categories": _as_json(measure_acceptance(full_length, source, count, config.max_num_seqs)),
            }
            for t, source in kinds.items()
        ]
        info = full_length.info
        sizes = {"num_speculative_tokens": info.num_speculative_tokens, **info.draft_shape.settings()}
        return sizes, acceptance


@contextmanager
def open_full_length(config: EngineConfig) -> Iterator[Driver]:
    spec = config.speculative_config
    assert spec is not None, "engine_of sets a speculative config"
    full_config = replace(config, speculative_config=replace(spec, adaptive=False))
    say("opening the drafter, whole blocks")
    driver = Driver(full_config, make_executor(full_config))
    try:
        yield driver
    finally:
        driver.close()


def measure_acceptance(
    driver: Driver, source: RequestSource, count: int, at_once: int
) -> dict[str, Acceptance]:
    """Return the acceptance of the first `count` requests, overall and by category that has drafts."""
    say(f"acceptance at temperature {source[0].temperature:g}: {count} prompts")
    done = driver.closed(source, range(count), min(at_once, count))
    answers = [answer for answer in done.answers if answer.number < count]
    depth = driver.info.num_speculative_tokens
    of: dict[str, list[AnswerRecord]] = defaultdict(list)
    for answer in answers:
        of[answer.category].append(answer)
    groups = {OVERALL: answers, **{name: of[name] for name in sorted(of)}}
    return {
        name: found for name, group in groups.items() if (found := acceptance_of(group, depth)) is not None
    }


def acceptance_of(answers: Sequence[AnswerRecord], depth: int) -> Acceptance | None:
    """`depth`: most drafts that a block can accept; a tree has more. None without verified blocks."""
    blocks = [_verified(answer.blocks) for answer in answers]
    fresh = [_verified(blocks_before_repetition(answer)) for answer in answers]
    length = _tokens_per_step(blocks)
    if length is None:
        return None
    sums = [Sums.of(answer.blocks) for answer in answers]
    at, longest = partial(_at, sums), min(depth, max(len(one.drafted) for one in sums))
    shares = (ratio_of_sums(at("accepted", i), at("drafted", i), 0.0, 1.0) for i in range(longest))
    return Acceptance(
        num_prompts=len(answers),
        num_blocks=sum(map(len, blocks)),
        num_fresh_blocks=sum(map(len, fresh)),
        tokens_per_step=length,
        fresh_tokens_per_step=_tokens_per_step(fresh),
        by_position=tuple(share for share in shares if share is not None),
    )


def _verified(blocks: Sequence[DraftBlock]) -> list[DraftBlock]:
    return [block for block in blocks if block.num_drafted]


def _tokens_per_step(blocks_of_answers: Sequence[Sequence[DraftBlock]]) -> RatioEstimate | None:
    """Return the tokens of a block, those that its answer has: none after an end token."""
    num_tokens = [sum(block.num_tokens for block in blocks) for blocks in blocks_of_answers]
    return ratio_of_sums(num_tokens, [len(blocks) for blocks in blocks_of_answers], minimum=1.0)


def blocks_before_repetition(answer: AnswerRecord) -> list[DraftBlock]:
    """Return the blocks whose first token precedes the answer's first repetition."""
    fresh = num_fresh_tokens(answer.token_ids)
    starts = accumulate((block.num_tokens for block in answer.blocks), initial=0)
    return [block for start, block in zip(starts, answer.blocks, strict=False) if start < fresh]


def _at(sums: Sequence[Sums], what: str, place: int) -> list[int]:
    """Return for each answer how often draft `place` was `what` ("drafted" or "accepted")."""
    return [counts[place] if place < len(counts := getattr(one, what)) else 0 for one in sums]


def _as_json(found: Mapping[str, Acceptance]) -> Figures:
    return {name: one.as_json() for name, one in found.items()}


def _speed(
    drivers: Mapping[str, Driver], source: RequestSource, count: int, requests: int, options: EvalOptions
) -> Figures:
    """Measure the engine as it serves against plain decoding; a turn of both is one unit of the interval."""
    # Warm-up. The slowest side determines the length of turns.
    first = range(min(count, 2 * requests))
    slowest = min(driver.closed(source, first, requests).tokens_per_s for driver in drivers.values())
    turns = split_evenly(count, prompts_per_turn(requests, slowest, options.max_tokens), requests)
    passes: dict[str, list[LoadPass]] = {name: [] for name in drivers}
    parts = [
        range(number * count + turn.start, number * count + turn.stop)
        for number in range(options.rounds)
        for turn in turns
    ]
    watch = Watch()
    with watch.open():
        for number, part in enumerate(parts):
            if number % len(turns) == 0:
                say(f"speed, {requests} request(s), round {number // len(turns) + 1}/{options.rounds}")
            for name in rotated(list(drivers), number):
                passes[name].append(drivers[name].closed(source, part, requests))
    token_ids = {
        name: [_of_part(done, part) for done, part in zip(passes[name], parts, strict=True)]
        for name in drivers
    }
    sizes = [sum(map(len, tokens)) for tokens in token_ids[PLAIN]]
    seconds = {
        name: [size / done.user_tokens_per_s for size, done in zip(sizes, passes[name], strict=True)]
        for name in drivers
    }
    speedup = ratio_of_sums(seconds[PLAIN], seconds[ADAPTIVE], minimum=0.0)
    assert speedup is not None, "a round takes time"
    sums = Sums.of([block for done in passes[ADAPTIVE] for answer in done.answers for block in answer.blocks])
    return {
        "plain_tokens_per_s": _tokens_per_s(passes[PLAIN]),
        "tokens_per_s": _tokens_per_s(passes[ADAPTIVE]),
        "speedup": speedup.as_json(),
        "tokens_per_step": rounded(sums.tokens_per_step),
        "identical": token_ids[PLAIN] == token_ids[ADAPTIVE],
        "turns": len(parts),
        "idleness": watch.found.as_json(),
    }


def _of_part(done: LoadPass, part: range) -> list[list[int]]:
    """Return the answers to the requests of `part`, without later ones that only kept the load constant."""
    answers = sorted(done.answers, key=lambda answer: answer.number)
    return [answer.token_ids for answer in answers if answer.number in part]


def _tokens_per_s(passes: Sequence[LoadPass]) -> float:
    return round(sum(done.tokens for done in passes) / sum(done.seconds for done in passes), 2)


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    path: Path
    rows: list[PromptRow]


def open_suite(name: str, num_prompts: int | None = None) -> Suite:
    """Read a suite of the package or a JSONL file of prompts, `num_prompts` of them taken evenly."""
    path, usual = _SUITES.get(name, (Path(name), None))
    if not shipped(path).is_file():
        raise DatasetError(
            f"suite={name!r} must be {', '.join(_SUITES)} or a JSONL file of prompts.", param="suite"
        )
    try:
        rows = read_rows(path, num_prompts or usual)
    except RequestError as error:
        raise DatasetError(f"suite={name!r}: {path}: {error.message}", param="suite") from None
    if not rows:
        raise DatasetError(f"suite={name!r} contains no prompt.", param="suite")
    return Suite(path.stem if path == Path(name) else name, path, rows)
