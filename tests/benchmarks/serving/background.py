"""`benchmarks background`: the effect of a running batch on online requests.

Requests arrive in an open loop (a Poisson process), once alone and once while a batch of `/v1/batches` uses
the remaining capacity; both alternate, with the same requests at the same times. The bar: p95 time per token
at most 1.1 times that without the batch (`docs/decisions/background.md`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.openai.file_store import FileStore
from manta.actors.tokenization.checkpoint_paths import with_absolute_paths
from manta.actors.tokenization.prompts import Chat
from manta.cluster.config import EngineConfig
from manta.cluster.errors import MantaError
from manta.jobs.bench.common.engine_passes import Figures, read_rows, record, rotated, say
from manta.jobs.bench.common.idle_check import print_warning
from manta.jobs.bench.common.request_source import LoadRequest, RequestSource
from manta.jobs.bench.sweep.load_records import describe
from manta.jobs.common.http_client import ServerClient
from manta.jobs.common.tables import print_table

from ..arrivals import Arrivals
from ..options import BackgroundOptions
from ..processes.process_tree import TreeWatch
from .http_load import ServedPass, Target, find_server, pass_figures, send
from .own_server import manta_serve

BAR = 1.1
COMPARED = (("tpot", "p50"), ("tpot", "p95"), ("ttft", "p50"), ("ttft", "p95"))
POLL_S, START_TIMEOUT_S, END_TIMEOUT_S, STREAM_TIMEOUT_S = 0.2, 120.0, 60.0, 600.0
LOOK_EVERY_S = 1.0
WARM_UP = 8  # requests
ENDED = ("completed", "cancelled", "expired", "failed")

SIDES = ("alone", "beside")


def run_background_bench(config: EngineConfig, options: BackgroundOptions) -> Figures:
    """Measure on a new server, print tables, write the figures if requested, and return them."""
    config = replace(with_absolute_paths(config), enable_prefix_caching=False)
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as scratch:
        storage = Path(scratch) / "batches"
        say("starting manta serve")
        with manta_serve(config, Path(scratch), "--batch-storage", str(storage)) as url:
            points = measure(url, storage, options, TreeWatch(look_every_s=LOOK_EVERY_S))
    print_points(points)
    return record(config, options, points)


def measure(url: str, storage: Path, options: BackgroundOptions, watch: TreeWatch | None) -> list[Figures]:
    """Measure both sides at each rate on a server that stores its batches in `storage`."""
    target = find_server(url)
    rows = read_rows(options.prompts, options.num_prompts)
    source = RequestSource(rows, options.max_tokens, options.temperature)
    greedy = RequestSource(rows, options.max_tokens, 0.0)
    content = batch_lines(target, [greedy[number] for number in range(options.lines)])
    file = FileStore(Storage.open(str(storage), field="storage")).upload("lines.jsonl", "batch", content)
    asyncio.run(send(target, [source[i] for i in range(WARM_UP)], Arrivals(1e3), WARM_UP, STREAM_TIMEOUT_S))
    batches = _Batches(url, file.id, _endpoint(greedy[0]))
    return [_measure(target, source, batches, rate, options, watch) for rate in options.rates]


def batch_lines(target: Target, requests: Sequence[LoadRequest]) -> bytes:
    """Return the input of a batch with these requests, limited to the endpoint of the first."""
    url, lines = _endpoint(requests[0]), []
    for request in requests:
        if _endpoint(request) == url:
            body = {name: value for name, value in target.body(request).items() if name != "stream_options"}
            lines.append({"custom_id": str(request.number), "method": "POST", "url": url, "body": body})
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _endpoint(request: LoadRequest) -> str:
    return "/v1/chat/completions" if isinstance(request.prompt, Chat) else "/v1/completions"


def _measure(
    target: Target,
    source: RequestSource,
    batches: _Batches,
    rate: float,
    options: BackgroundOptions,
    watch: TreeWatch | None,
) -> Figures:
    done: dict[str, list[_SidePass]] = {name: [] for name in SIDES}
    for number in range(options.rounds):
        first = number * options.num_requests
        chosen = [source[first + i] for i in range(options.num_requests)]
        for name in rotated(SIDES, number):
            say(f"{rate:g} requests/s, round {number + 1}/{options.rounds}: {name}")
            with batches.running() if name == "beside" else nullcontext():
                before = batches.tokens_of_engine()
                with nullcontext() if watch is None else watch.open():
                    load = asyncio.run(send(target, chosen, Arrivals(rate), None, STREAM_TIMEOUT_S))
                done[name].append(_SidePass(load, batches.tokens_of_engine() - before))
    return {
        "request_rate": rate,
        "requests": options.rounds * options.num_requests,
        "sides": [_figures_of_side(name, done[name]) for name in SIDES],
        "ratios": _ratios(*(done[name] for name in SIDES)),
        "idleness": None if watch is None else watch.found.as_json(),
    }


@dataclass(frozen=True, slots=True)
class _SidePass:
    """A side's turn: the clients' results, and all tokens that the engine generated meanwhile."""

    load: ServedPass
    tokens: float

    @property
    def batch_tokens_per_s(self) -> float:
        return (self.tokens - sum(reply.num_tokens for reply in self.load.replies)) / self.load.seconds


def _figures_of_side(name: str, passes: Sequence[_SidePass]) -> Figures:
    replies = [reply for each in passes for reply in each.load.replies]
    together = ServedPass(sum(each.load.seconds for each in passes), replies)
    batch = statistics.median(each.batch_tokens_per_s for each in passes)
    return {"side": name, "batch_tokens_per_s": round(batch, 2), **pass_figures(together)}


def _ratios(alone: Sequence[_SidePass], beside: Sequence[_SidePass]) -> Figures:
    """Return latencies with a batch divided by those without: medians over rounds; None if undefined."""
    rounds = [
        tuple(describe([reply.waits for reply in side.load.replies if reply.whole]) for side in both)
        for both in zip(alone, beside, strict=True)
    ]
    found: Figures = {}
    for kind, quantile in COMPARED:
        times = [(before[f"{kind}_ms"], after[f"{kind}_ms"]) for before, after in rounds]
        known = all(before and after for before, after in times)
        ratios = [after[quantile] / before[quantile] for before, after in times] if known else []
        found[f"{kind}_{quantile}"] = round(statistics.median(ratios), 4) if ratios else None
    return found


def print_points(points: Sequence[Figures]) -> None:
    """Print a table per rate, and the ratio that the bar applies to."""
    for point in points:
        rows = [
            [
                side["side"],
                str(side["completed"]),
                f"{side['tokens_per_s']:.1f}",
                *("-" if (ms := side[f"{k}_ms"]) is None else f"{ms[q]:.2f}" for k, q in COMPARED),
                f"{side['batch_tokens_per_s']:.1f}",
            ]
            for side in point["sides"]
        ]
        columns = ["", "done", "tok/s", *(f"{k} {q}" for k, q in COMPARED), "batch tok/s"]
        print_table(f"{point['request_rate']:g} requests/s; times in ms", columns, rows)
        ratio = point["ratios"]["tpot_p95"]
        if ratio is not None:
            print(f"p95 time per token with a batch: {ratio:.2f} x that without (bar {BAR})")
        for side in point["sides"]:
            for kind, number in side["failures"].items():
                print(f"{side['side']}: {number} failed: {kind}")
    print_warning([point["idleness"] for point in points if point["idleness"] is not None])


class _Batches:
    """Runs batches of one input file.

    Each request has its own connection, since the server closes connections that are idle during a
    measurement.
    """

    def __init__(self, url: str, file_id: str, endpoint: str) -> None:
        self._url = url
        self._body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a batch within the `with` block and cancel it. Raises MantaError if it ended too early."""
        path = f"/v1/batches/{self._ask('/v1/batches', self._body)['id']}"
        self._wait(path, START_TIMEOUT_S, lambda batch: batch["request_counts"]["completed"] > 0)
        try:
            yield
            if (status := self._ask(path)["status"]) in ENDED:
                raise MantaError(
                    f"The batch was {status} before the online requests had finished. Give it more --lines."
                )
        finally:
            if self._ask(path)["status"] not in ENDED:
                self._ask(f"{path}/cancel", {})
                self._wait(path, END_TIMEOUT_S, lambda batch: batch["status"] in ENDED)

    def tokens_of_engine(self) -> float:
        """Return the tokens generated since the server's start."""
        with ServerClient(self._url) as client:
            lines = client.text("/metrics").splitlines()
        wanted = ("vllm:generation_tokens_total ", "vllm:generation_tokens_total{")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))

    def _ask(self, path: str, body: Mapping[str, object] | None = None) -> Mapping[str, Any]:
        with ServerClient(self._url) as client:
            answer = client.request(path, body)
        if answer.status != 200:
            raise MantaError(f"{path} answered {answer.status}: {answer.error}")
        return answer.body

    def _wait(self, path: str, timeout_s: float, reached: Callable[[Mapping[str, Any]], bool]) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not reached(batch := self._ask(path)):
            if time.monotonic() > deadline_s:
                raise MantaError(f"The batch is {batch['status']} after {timeout_s:g} s: {batch['errors']}")
            time.sleep(POLL_S)
