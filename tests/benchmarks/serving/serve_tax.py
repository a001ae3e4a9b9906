"""`benchmarks serve-tax`: the overhead of each layer between the engine and a client, and its CPU time.

The same streams from the bare engine, from the engine with its worker in an actor, from the application under
uvicorn, and from Ray Serve behind HAProxy (`serve_tax_sides.py`). Sides alternate: in each round every side
runs alone through all points, in rotating order. The tax of a side is its loss of speed against the bare
engine in the same round; medians over rounds are reported. CPU time is reported by process, per 1,000 tokens
(`process_clocks.py`); if the engine runs in this process, its time counts as the client's.
"""

from __future__ import annotations

import asyncio
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from manta.actors.batch.dataset.row_requests import row_seed
from manta.actors.checkpoints.checkpoint_paths import with_absolute_paths
from manta.actors.system.atomic_files import rounded
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError, MantaError
from manta.jobs.bench.common.engine_passes import (
    Figures,
    Pass,
    Prompt,
    encode_prompts,
    ratios,
    read_prompts,
    record,
    rotated,
    say,
)
from manta.jobs.bench.common.idle_check import print_warning
from manta.jobs.common.tables import NO_FIGURE, print_table

from ..options import ServeTaxOptions
from ..processes.process_clocks import ROLES, read_role_clocks
from ..processes.process_tree import TreeWatch
from .serve_tax_sides import NAMES, SIDES, Asker, Question, Reply, Side, peer_side

MIN_STREAMS = 8  # minimum number of streams of a point
MAX_GROUPS = 4  # streams of a point as a multiple of the concurrency, which drops at the end
MAX_STREAMS = 64
WARM_UP_TOKENS = 32
LOOK_EVERY_S = 1.0  # to count the processes of a side's Ray, which end with it


@dataclass
class TaxPass(Pass):
    """A pass of a side over the streams of a point.

    Attributes:
        first_s: time to first token of each stream.
        cpu_s: CPU time of the side's processes by role.
    """

    first_s: list[float] = field(default_factory=list)
    cpu_s: Mapping[str, float] = field(default_factory=dict)


def run_serve_tax(config: EngineConfig, options: ServeTaxOptions) -> Figures:
    """Measure, print a table per point, write the figures if requested, and return them."""
    config = replace(with_absolute_paths(config), enable_prefix_caching=False)
    _check_concurrency(config, options)
    prompts = encode_prompts(read_prompts(options.prompts, options.num_prompts), load_tokenizer(config))
    peers = _peers(options.peers)
    sides = {NAMES[name]: SIDES[name] for name in options.sides} | peers
    passes: dict[tuple[int, float], dict[str, list[TaxPass]]] = {
        point: {name: [] for name in sides} for point in options.points
    }
    watch = TreeWatch(look_every_s=LOOK_EVERY_S)
    with tempfile.TemporaryDirectory(prefix="manta-tax-") as scratch:
        for number in range(options.rounds):
            for name in rotated(list(sides), number):
                say(f"round {number + 1}/{options.rounds}: {name}")
                with watch.open():
                    side = sides[name](config, Path(scratch))
                    done = asyncio.run(_run_side(side, options, prompts, may_fail=name in peers))
                for point, found in done.items():
                    passes[point][name].append(found)
    points = [_figures(point, found, options.rounds, watch) for point, found in passes.items()]
    for point in points:
        print_point(point)
    print(f"\n{markdown_table(points, list(sides))}")
    print_warning([watch.found.as_json()])
    return record(config, options, points)


def print_point(point: Figures) -> None:
    """Print the table of one point: speed, time to first token, and CPU time by process."""
    columns = ["side", "tok/s", "of engine", "first ms", "identical", *ROLES, "together"]
    rows = [
        [
            side["name"],
            f"{side['tokens_per_s']:.1f}",
            NO_FIGURE if side["ratio"] is None else f"{side['ratio']:.3f}",
            f"{side['first_token_ms']:.1f}",
            {None: NO_FIGURE, True: "yes", False: "no"}[side["identical"]],
            *(f"{side['cpu_s_per_1k_tokens'][role]:.3f}" for role in ROLES),
            f"{sum(side['cpu_s_per_1k_tokens'].values()):.3f}",
        ]
        for side in point["sides"]
    ]
    title = f"{point['streams']} stream(s) at once, T = {point['temperature']:g}, {point['tokens']} tokens"
    print_table(f"{title}; by process: CPU seconds per 1,000 tokens", columns, rows)


def markdown_table(points: Sequence[Figures], names: Sequence[str]) -> str:
    """Return tokens/s and, in brackets, the time to first token of each side, a row per point."""
    rows = [["streams, temperature: tokens/s (TTFT p50, ms)", *names], ["---"] * (len(names) + 1)]
    for point in points:
        cells = {
            side["name"]: f"{side['tokens_per_s']:,.0f} ({side['first_token_ms']:.0f})"
            for side in point["sides"]
        }
        title = f"{point['streams']}, T = {point['temperature']:g}"
        rows.append([title, *(cells.get(name, NO_FIGURE) for name in names)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _peers(commands: Sequence[str]) -> dict[str, Side]:
    """Return the sides of the peers by the name of their program."""
    peers: dict[str, Side] = {}
    for command in commands:
        name = Path(shlex.split(command)[0]).name
        if name in peers:
            raise ConfigError(
                f"peers: two commands run {name!r}. Give one a script of its own.", param="peers"
            )
        peers[name] = partial(peer_side, command)
    return peers


async def _run_side(
    side: AbstractAsyncContextManager[Asker],
    options: ServeTaxOptions,
    prompts: Sequence[Prompt],
    *,
    may_fail: bool,
) -> dict[tuple[int, float], TaxPass]:
    """Return a pass for each point; with `may_fail` for the points before the first failure."""
    found: dict[tuple[int, float], TaxPass] = {}
    try:
        async with side as asker:
            for streams, temperature in options.points:
                questions = _questions(prompts, streams, options.max_tokens, temperature)
                warm_up = [replace(q, max_tokens=WARM_UP_TOKENS) for q in questions[:streams]]
                await _ask_all(asker, warm_up, streams)
                found[streams, temperature] = await _measure(asker, questions, streams)
    except MantaError as error:
        if not may_fail:
            raise
        say(f"left out of {len(options.points) - len(found)} point(s): {error.message}")
    return found


async def _measure(asker: Asker, questions: Sequence[Question], streams: int) -> TaxPass:
    before, begin_s = read_role_clocks(), time.perf_counter()
    replies = await _ask_all(asker, questions, streams)
    seconds = time.perf_counter() - begin_s
    ids = [reply.token_ids for reply in replies if reply.token_ids is not None]
    return TaxPass(
        seconds=seconds,
        tokens=sum(reply.num_tokens for reply in replies),
        token_ids=ids if len(ids) == len(replies) else None,
        first_s=[reply.first_s for reply in replies],
        cpu_s=read_role_clocks().since(before),
    )


async def _ask_all(asker: Asker, questions: Sequence[Question], at_once: int) -> list[Reply]:
    """Return the replies in the order of the questions; raises the first failure."""
    replies: dict[int, Reply] = {}
    waiting = iter(enumerate(questions))

    async def work() -> None:
        async with asker.worker() as ask:
            for i, question in waiting:
                replies[i] = await ask(question)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return [replies[i] for i in range(len(questions))]


def _questions(
    prompts: Sequence[Prompt], streams: int, max_tokens: int, temperature: float
) -> list[Question]:
    count = max(MIN_STREAMS, streams, min(MAX_STREAMS, MAX_GROUPS * streams))
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    return [
        Question(token_ids, max_tokens, temperature, seed=row_seed(0, f"{name} {i}"))
        for i, (name, token_ids) in enumerate(chosen)
    ]


def _figures(
    point: tuple[int, float], passes: Mapping[str, list[TaxPass]], rounds: int, watch: TreeWatch
) -> Figures:
    streams, temperature = point
    whole = {name: found for name, found in passes.items() if len(found) == rounds}
    bare = whole.get(NAMES["engine"])
    return {
        "streams": streams,
        "temperature": temperature,
        "tokens": max(found[-1].tokens for found in whole.values()),
        "sides": [_figures_of_side(name, found, bare) for name, found in whole.items()],
        "failed": [name for name in passes if name not in whole],
        "idleness": watch.found.as_json(),
    }


def _figures_of_side(name: str, found: Sequence[TaxPass], bare: Sequence[TaxPass] | None) -> Figures:
    def cpu(role: str) -> float:
        return statistics.median(1e3 * one.cpu_s[role] / one.tokens for one in found)

    return {
        "name": name,
        "tokens_per_s": round(statistics.median(one.tokens_per_s for one in found), 2),
        "rounds_tokens_per_s": [round(one.tokens_per_s, 2) for one in found],
        "ratio": None if bare is None else rounded(statistics.median(ratios(found, bare))),
        "first_token_ms": round(1e3 * statistics.median(s for one in found for s in one.first_s), 2),
        "identical": None
        if bare is None or found[-1].token_ids is None
        else found[-1].token_ids == bare[-1].token_ids,
        "cpu_s_per_1k_tokens": {role: round(cpu(role), 4) for role in ROLES},
    }


def _check_concurrency(config: EngineConfig, options: ServeTaxOptions) -> None:
    if (maximum := max(options.concurrency)) > config.max_num_seqs:
        raise ConfigError(
            f"{maximum} streams at once would wait for each other: max_num_seqs={config.max_num_seqs}. Raise "
            "it, or ask for fewer with --max-concurrency.",
            param="max_num_seqs",
        )
