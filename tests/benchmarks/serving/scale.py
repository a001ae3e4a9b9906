"""`benchmarks scale`: the number of replicas follows the load on real Serve, without failing requests.

Clients send one streamed request after another: few clients, then many until the maximum of replicas serve,
then few until the minimum do; if the minimum is 0, no clients until there are no replicas, and few again. The
plot shows serving, starting and stopping replicas and the time to first token. Replicas share this machine's
cores, so more of them need not be faster: the benchmark is about starting and stopping them. The policy is in
`cluster/fleet/autoscaling.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from manta.actors.http.config.settings import parse_replicas
from manta.actors.http.config.settings_mapping import split_settings
from manta.actors.system.atomic_files import write_json
from manta.actors.system.host_resources import free_port
from manta.cluster.errors import MantaError
from manta.cluster.fleet.placement import Topology
from manta.cluster.records.percentiles import percentiles
from manta.jobs.bench.common.engine_passes import Figures, say
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.http_client import ServerClient, await_ready
from manta.jobs.common.plots import can_plot
from manta.jobs.common.tables import print_table
from manta.jobs.serve.server import ServeOptions, Server, start_server

from ..options import ScaleOptions
from ..processes.process_tree import TreeWatch

LOOK_S = 0.5
WINDOW_S = 5.0  # window of the percentiles of first tokens
SPARE_CPUS = 2  # Ray resources for Serve besides replicas, not cores


@dataclass(frozen=True, slots=True)
class Asked:
    """A request; times since the beginning. `first_s` is None without tokens, `error` without failure."""

    begin_s: float
    first_s: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Moment:
    """Number of serving, starting and stopping replicas, and of clients, at a time."""

    at_s: float
    serving: int
    starting: int
    ending: int
    clients: int


@dataclass
class Seen:
    moments: list[Moment] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)


class Clients:
    """Threads that send one request after another; their number can change.

    Args:
        url: URL of the server.
        body: body of every request.
    """

    def __init__(self, url: str, body: Mapping[str, Any], begin_s: float, seen: Seen) -> None:
        self._url = url
        self._body = body
        self._begin_s = begin_s
        self._seen = seen
        self._threads: list[tuple[threading.Thread, threading.Event]] = []

    def __len__(self) -> int:
        return len(self._threads)

    def resize(self, count: int) -> None:
        """Change the number of clients; surplus ones finish their request."""
        gone = self._threads[count:]
        del self._threads[count:]
        for _, stop in gone:
            stop.set()
        for thread, _ in gone:
            thread.join()
        for number in range(len(self._threads), count):
            stop = threading.Event()
            thread = threading.Thread(target=self._ask_on, args=(number, stop), daemon=True)
            self._threads.append((thread, stop))
            thread.start()

    def _ask_on(self, number: int, stop: threading.Event) -> None:
        with ServerClient(self._url) as client:
            requested = 0
            while not stop.is_set():
                requested += 1
                self._seen.asked.append(self._ask(client, f"Client {number} asks {requested} times."))

    def _ask(self, client: ServerClient, text: str) -> Asked:
        begin_s, first_s, error = time.monotonic(), None, None
        try:
            for _ in client.stream_chat({**self._body, "messages": [{"role": "user", "content": text}]}):
                first_s = first_s or time.monotonic() - begin_s
        except MantaError as failure:
            error = failure.message
        return Asked(begin_s - self._begin_s, first_s, error)


def run_scale(settings: Mapping[str, Any], options: ScaleOptions) -> Figures:  # Any: plain data
    """Run the server and the load, print tables, write the requested files, and return the figures.

    Raises:
        MantaError: the number of replicas was not reached in time, or a request failed.
    """
    minimum, maximum = options.replicas
    args = {
        "num_threads": 1,
        **settings,
        "replicas": f"{minimum}:{maximum}",
        "scaling": asdict(options.rules),
    }
    config, server_settings = split_settings(args)
    assert parse_replicas(server_settings.replicas) == options.replicas
    options = replace(options, many=options.height(config.max_num_seqs))
    bundles = Topology.of(config, {}).replica_bundles(1.0)
    num_cpus = round(maximum * sum(bundle.get("CPU", 0.0) for bundle in bundles)) + SPARE_CPUS
    where = ServeOptions(port=free_port(), num_cpus=num_cpus)
    watch = TreeWatch(look_every_s=LOOK_S)
    with start_server(args, where) as server, watch.open():
        seen = _load(server, where.name, server_settings.model_names(config.model)[0], options)
    figures = {
        "provenance": provenance(),
        "engine": asdict(config),
        "options": {**asdict(options), "output": None, "plot": None},
        "machine": watch.found.as_json(),
        **summary(seen),
    }
    _show(figures)
    if options.output is not None:
        write_json(options.output, figures)
    if options.plot is not None and can_plot():
        from .scale_plot import plot_scale

        plot_scale(figures, options.plot)
    if failed := [requested.error for requested in seen.asked if requested.error]:
        raise MantaError(f"{len(failed)} of {len(seen.asked)} requests failed; the first: {failed[0]}")
    return figures


def _load(server: Server, application: str, model: str, options: ScaleOptions) -> Seen:
    """Run the phases: few clients, many, few."""
    (minimum, maximum), many = options.replicas, options.many
    assert many is not None, "run_scale sets the number of clients"
    begin_s, seen = time.monotonic(), Seen()
    body = {"model": model, "max_tokens": options.max_tokens, "temperature": 0, "ignore_eos": True}
    clients = Clients(server.url, body, begin_s, seen)
    with ExitStack() as stack:
        stack.enter_context(_watched(application, begin_s, clients, seen))
        stack.callback(clients.resize, 0)
        minimum = max(minimum, 1)
        phases = [(options.few, minimum), (many, maximum), (options.few, minimum)]
        if minimum == 0:
            phases += [(0, 0), (options.few, 1)]
        for count, replicas in phases:
            say(f"{count} client(s), until {replicas} replica(s) serve")
            clients.resize(count)
            _await(seen, replicas, options.timeout_s)
            if replicas == 0:
                await_ready(server.url, LOOK_S)  # healthy without replicas
            time.sleep(options.hold_s)
    return seen


def _await(seen: Seen, replicas: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not seen.moments or seen.moments[-1].serving != replicas:
        if time.monotonic() > deadline_s:
            last = seen.moments[-1] if seen.moments else None
            raise MantaError(f"{replicas} replicas were not reached within {timeout_s:.0f} s; last: {last}.")
        time.sleep(LOOK_S)


@contextmanager
def _watched(application: str, begin_s: float, clients: Clients, seen: Seen) -> Iterator[None]:
    """Record the number of replicas within the `with` block."""
    from manta.actors.replica import DEPLOYMENT
    from ray import serve

    stop = threading.Event()

    def look() -> None:
        while not stop.wait(LOOK_S):
            found = serve.status().applications[application].deployments[DEPLOYMENT].replica_states
            states = {str(getattr(state, "value", state)): count for state, count in found.items()}
            seen.moments.append(
                Moment(
                    round(time.monotonic() - begin_s, 1),
                    states.get("RUNNING", 0),
                    states.get("STARTING", 0),
                    states.get("STOPPING", 0),
                    len(clients),
                )
            )

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def summary(seen: Seen) -> Figures:
    """Return replicas and first tokens over time; a request counts in the window in which it was sent."""
    moments = [m for i, m in enumerate(seen.moments) if i == 0 or _state(m) != _state(seen.moments[i - 1])]
    return {
        "requests": len(seen.asked),
        "failed": sum(requested.error is not None for requested in seen.asked),
        "first_token_s": _latencies([a.first_s for a in seen.asked if a.first_s is not None]),
        "seconds": seen.moments[-1].at_s if seen.moments else 0.0,
        "moments": [asdict(moment) for moment in moments],
        "windows": list(_windows(seen.asked)),
    }


def _state(moment: Moment) -> tuple[int, ...]:
    return moment.serving, moment.starting, moment.ending, moment.clients


def _windows(requested: Sequence[Asked]) -> Iterator[Figures]:
    by_window: dict[int, list[float]] = {}
    for each in requested:
        if each.first_s is not None:
            by_window.setdefault(int(each.begin_s // WINDOW_S), []).append(each.first_s)
    for number, firsts in sorted(by_window.items()):
        yield {"at_s": number * WINDOW_S, "requests": len(firsts), "first_token_s": _latencies(firsts)}


def _latencies(seconds: Sequence[float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in percentiles(seconds).items()}


def _show(figures: Figures) -> None:
    rows = [
        [
            f"{moment['at_s']:.1f}",
            *(str(moment[name]) for name in ("clients", "serving", "starting", "ending")),
        ]
        for moment in figures["moments"]
    ]
    print_table("replicas over time", ["s", "clients", "serve", "start", "end"], rows, num_left=0)
    first = figures["first_token_s"]
    rows = [[str(figures["requests"]), str(figures["failed"]), *(f"{first[p] * 1e3:.0f}" for p in first)]]
    print_table("requests", ["asked", "failed", *(f"first token {p} (ms)" for p in first)], rows, num_left=0)
