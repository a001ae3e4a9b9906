"""`manta bench serve`: load on an OpenAI-compatible server, ours or another, and what its clients see.

Requests over a file's prompts, streamed, in a closed loop (so many at once) or an open one (so many per
second, however the server keeps up). Words and definitions are those of `vllm bench serve`. Without a URL
it starts `manta serve`.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....actors.checkpoints import with_absolute_paths
from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ...tables import print_table
from ..idleness import Watch, print_warning
from ..load.arrivals import Arrivals
from ..load.asks import Asks
from ..load.latencies import curves, describe, num_good
from ..own_server import manta_serve
from ..passes import Figures, RunOptions, read_rows, record, say
from .load import Reply, ServedPass, send
from .server import Target, find_server, read_counters, speculation

LEAST_REQUESTS, GROUPS = 32, 4  # of a point: in all, and of those at once
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchOptions(RunOptions):
    """What is asked.

    Attributes:
        num_requests: of each point; None: enough for its concurrency.
        concurrency: a point each in a closed loop; with `rates`, most that are open at once (one number).
        rates: requests per second, a point each.
        burstiness: of arrivals.
        goodput: most milliseconds by kind of time.
        url: of the server; None starts one.
        server_model: its name there.
        api_key: bearer token.
        label: name of what is measured, in tables and pictures.
        timeout_s: of each stream.
    """

    num_prompts: int = 240
    num_requests: int | None = None
    concurrency: tuple[int, ...] = (1, 8, 32)
    rates: tuple[float, ...] = ()
    burstiness: float = 1.0
    temperature: float = 0.0
    goodput: Mapping[str, float] = field(default_factory=dict)
    url: str | None = None
    server_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    label: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.rates:
            RunOptions.__post_init__(self)
        if len(self.concurrency) > 1 and self.rates:
            raise ConfigError(
                f"concurrency={self.concurrency} must be one number beside request_rate: most that are open.",
                param="concurrency",
            )
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"num_requests={self.num_requests} must be at least 1.", param="num_requests")

    @property
    def points(self) -> list[tuple[int | None, Arrivals]]:
        """(most at once, when they come)."""
        if not self.rates:
            return [(at_once, Arrivals(math.inf)) for at_once in self.concurrency]
        bound = self.concurrency[0] if self.concurrency else None
        return [(bound, Arrivals(rate, self.burstiness)) for rate in self.rates]


def run_serve_bench(config: EngineConfig | None, options: ServeBenchOptions) -> Figures:
    """Measure, print a table, and write what the options ask for. Returns the figures.

    Args:
        config: of the server that is started where the options name none.
    """
    points = options.points  # refuses what cannot be, before a server starts
    rows = read_rows(options.prompts, options.num_prompts)
    asks = Asks(rows, options.max_tokens, options.temperature)
    with _server(config, options) as (url, watch):
        target = find_server(url, options.server_model, options.api_key)
        found = [_measure(target, asks, at_once, when, options, watch) for at_once, when in points]
    label = options.label or target.model.rpartition("/")[2]
    print_points(label, found, options.goodput)
    more = {"label": label, "model": target.model}
    return record(config, replace(options, api_key=None), found, more)


@contextmanager
def _server(config: EngineConfig | None, options: ServeBenchOptions) -> Iterator[tuple[str, Watch | None]]:
    """Its URL, and what watches the machine: nothing where a server that was there before would count as
    others."""
    if options.url is not None:
        yield options.url, None
        return
    assert config is not None, "without a URL there is a config"
    config = replace(with_absolute_paths(config), enable_prefix_caching=False)
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as scratch:
        say("starting manta serve")
        with manta_serve(config, Path(scratch)) as url:
            yield url, Watch(look_every_s=LOOK_EVERY_S)


def _measure(
    target: Target,
    asks: Asks,
    at_once: int | None,
    arrivals: Arrivals,
    options: ServeBenchOptions,
    watch: Watch | None,
) -> Figures:
    """A point, after a warm-up with as many requests at once, up to some."""
    count = options.num_requests or max(LEAST_REQUESTS, GROUPS * (at_once or 0))
    warm_up = [asks[number] for number in range(min(at_once or LEAST_REQUESTS, LEAST_REQUESTS))]
    say(f"{_load(at_once, arrivals.rate)}: {count} requests")
    asyncio.run(send(target, warm_up, Arrivals(math.inf), at_once, options.timeout_s))
    before = read_counters(target)
    with nullcontext() if watch is None else watch.open():
        chosen = [asks[number] for number in range(count)]
        done = asyncio.run(send(target, chosen, arrivals, at_once, options.timeout_s))
    return {
        "requests": at_once,
        "request_rate": None if math.isinf(arrivals.rate) else arrivals.rate,
        "burstiness": arrivals.burstiness,
        **pass_figures(done, options.goodput),
        "speculation": speculation(before, read_counters(target)),
        "idleness": None if watch is None else watch.found.as_json(),
    }


def pass_figures(done: ServedPass, goals: Mapping[str, float]) -> Figures:
    """What the clients saw. Tokens and times are of requests that ended well."""
    whole = [reply for reply in done.replies if reply.whole]
    waits = [reply.waits for reply in whole]
    tokens = sum(reply.num_tokens for reply in whole)
    request_s = sum(wait.e2el_s for wait in waits)
    good = num_good(waits, goals)
    return {
        "seconds": round(done.seconds, 3),
        "completed": len(whole),
        "failures": dict(Counter(kind for reply in done.replies if (kind := reply.failure) is not None)),
        "prompt_tokens": sum(int(reply.stream.usage.get("prompt_tokens", 0)) for reply in whole),
        "tokens": tokens,
        "tokens_told": all("completion_tokens" in reply.stream.usage for reply in whole),
        "requests_per_s": round(len(whole) / done.seconds, 3),
        "tokens_per_s": round(tokens / done.seconds, 2),
        "user_tokens_per_s": round(tokens / request_s, 2) if request_s else None,
        "goodput_per_s": round(good / done.seconds, 3) if goals else None,
        "good_share": round(good / len(done.replies), 4) if goals else None,
        **describe(waits),
        "curves": curves(waits),
        "categories": _categories(whole),
    }


def _categories(whole: Sequence[Reply]) -> Figures:
    """By category: how many, their tokens, and tokens per event, which is what a block brings where a server
    sends each block at once."""
    found: Figures = {}
    for name in sorted({reply.ask.category for reply in whole}):
        mine = [reply for reply in whole if reply.ask.category == name]
        tokens, events = sum(r.num_tokens for r in mine), sum(len(r.stream.token_times_s) for r in mine)
        found[name] = {"requests": len(mine), "tokens": tokens, "tokens_per_event": round(tokens / events, 3)}
    return found


def print_points(label: str, points: Sequence[Figures], goals: Mapping[str, float]) -> None:
    """A line per point; failures below."""
    kinds = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("itl", "p99"), ("e2el", "p50")]
    columns = ["load", "done", "req/s", "tok/s", "/user", "accepted", *(f"{k} {q}" for k, q in kinds)]
    columns += ["goodput"] if goals else []
    rows = [
        [
            _load(point["requests"], point["request_rate"] or math.inf),
            str(point["completed"]),
            f"{point['requests_per_s']:.2f}",
            f"{point['tokens_per_s']:.1f}",
            "-" if point["user_tokens_per_s"] is None else f"{point['user_tokens_per_s']:.1f}",
            "-" if point["speculation"] is None else f"{point['speculation']['mean_acceptance_length']:.2f}",
            *("-" if (ms := point[f"{k}_ms"]) is None else f"{ms[q]:.1f}" for k, q in kinds),
            *([f"{point['goodput_per_s']:.2f} ({point['good_share']:.0%})"] if goals else []),
        ]
        for point in points
    ]
    print_table(f"{label}; times in ms", columns, rows)
    for point in points:
        for kind, count in point["failures"].items():
            print(f"{_load(point['requests'], point['request_rate'] or math.inf)}: {count} failed: {kind}")
    print_warning([point["idleness"] for point in points if point["idleness"] is not None])


def _load(at_once: int | None, rate: float) -> str:
    if math.isinf(rate):
        return "all at once" if at_once is None else f"{at_once} at once"
    return f"{rate:g}/s" + ("" if at_once is None else f", at most {at_once}")
