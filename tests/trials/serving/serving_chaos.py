"""What a death costs clients: every process of a real server is killed under 32 streams.

    python tests/trials serving_chaos docs/operations-deaths [SETUP ..]   writes .md and .json (`make chaos`)

Each setup starts a server, lets 32 streams run undisturbed for their texts, and then, death by death, runs
them again and kills a process with SIGKILL while all are open. Meanwhile a client repeatedly requests one
token. Results: how the streams ended (complete with the same text, with an error event, cut, refused), how
long the slowest waited for its next event, when new requests were answered again permanently, the parts of
that time (`serving_log.py`), and what is left behind. With names of setups, only these are run; the file's
others stay. A short form is `test_serve_chaos.py`.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.streams import Stream
from manta.jobs.bench.common.provenance import provenance
from support.checkpoints.text_pair import make_text_pair
from support.engines.ray_engines import alive
from support.servers.served import Served, forgotten_since, shared_memory
from support.waiting import wait_until

from trials.serving.serving_load import Load, Probe, Prober
from trials.serving.serving_log import Return, read_return

STREAMS = 32
MAX_TOKENS = 300
SETTLE_S = 120.0
BAR_S = 5.0  # until service, without loading
PROXY_BAR_S = 3.0
RESUMED_BAR = 15 / 16  # of the streams, after a death behind which clients resume them


@dataclass(frozen=True)
class Death:
    """A death: the processes to kill.

    Attributes:
        victim: returns the processes of a server.
        watch_s: minimum time to watch, because some deaths have late effects.
        revive: restarts the process, as systemd or Kubernetes would; None: the server must do so.
        has_the_clients: clients' connections end in the process, and so with it; clients then resume.
        signal: that kills it, or stops it.
    """

    name: str
    victim: Callable[[Served], int]
    watch_s: float = 0.0
    revive: Callable[[Served], None] | None = None
    has_the_clients: bool = False
    signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Setup:
    """A server and the processes of it that are killed, in turn."""

    name: str
    deaths: tuple[Death, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    split: bool = False
    replicas: int = 1
    nodes: tuple[int, ...] = ()
    storage: bool = False  # the head's books outlive it

    @property
    def has_gateway(self) -> bool:
        return self.replicas > 1 or "replicas" in self.settings


@dataclass
class Found:
    """The cost of a death. Times are seconds after it.

    Attributes:
        same, other: streams that ended completely, with the undisturbed text or (never) with another.
        resumed: streams that clients continued on another connection.
        errors: streams with an error event and [DONE]; `retryable` of them and of the refused got 503.
        next_event_s: the longest time that a stream waited for its next token or its end.
        service_s: until a new request was answered and all later ones were; None: not within SETTLE_S.
        refused_probes: new requests meanwhile without an answer, by status.
        left: a description of what is left behind.
        load_s: the server's time to load its models.
        has_the_clients, has_gateway: see `Death` and `Setup`.
        is_stop: the process was stopped (SIGSTOP), and is replaced after its health checks.
        back: how a replica came back, by the server's own log.
    """

    setup: str
    death: str
    replicas: int
    streams: int
    same: int
    other: int
    resumed: int
    errors: int
    cut: int
    refused: int
    late: int
    retryable: int
    next_event_s: float | None
    service_s: float | None
    refused_probes: dict[str, int]
    left: list[str]
    load_s: float
    has_the_clients: bool
    has_gateway: bool
    is_stop: bool
    back: Return

    @property
    def held(self) -> bool:
        """The bar: with replicas no client notices; alone, a retryable error at once, and service in time."""
        if self.other or self.late or self.left or self.service_s is None:
            return False
        if self.has_the_clients and not self.has_gateway:
            return self.service_s <= PROXY_BAR_S
        if self.has_the_clients:
            return self.same >= RESUMED_BAR * self.streams and (self.is_stop or self.service_s <= PROXY_BAR_S)
        if self.replicas > 1 and self.refused_probes:
            return False
        if self.same == self.streams:
            return self.service_s <= BAR_S + self.load_s
        # A connection that is cut is an error that clients retry, too: `test_serve_chaos.py`.
        reported = self.retryable + self.cut == self.streams - self.same
        return self.replicas == 1 and reported and self.service_s <= BAR_S + self.load_s


class Trial:
    """A server of a setup, and deaths under it.

    Attributes:
        texts: of the streams, undisturbed.
    """

    def __init__(
        self, setup: Setup, served: Served, *, count: int = STREAMS, tokens: int = MAX_TOKENS
    ) -> None:
        self._setup, self._served = setup, served
        self._count, self._tokens = count, tokens
        first = self._cast()
        undisturbed = Load(served.url, count, tokens).join()
        assert all(stream.end == "whole" for stream in undisturbed), [s.end for s in undisturbed]
        self.texts = [stream.text for stream in undisturbed]
        self._whole = first & self._cast()  # without processes that were about to end

    def run(self, death: Death) -> Found:
        """Kill; wait until all streams have ended, and service is back or will not return."""
        missing = Counter[str]()

        def is_whole() -> bool:
            missing.clear()
            missing.update(self._whole - self._cast())
            return not missing and self._all_answer()

        wait_until(is_whole, SETTLE_S, missing, poll_s=0.1)
        before, groups = self._cast(), self._served.groups()
        shared = shared_memory()
        prober = Prober(self._served.url)
        load = Load(self._served.url, self._count, self._tokens, resumes=death.has_the_clients)
        load.wait_for_tokens()
        victim = death.victim(self._served)
        killed_s, killed = time.monotonic(), time.time()
        self._served.kill(victim, death.signal)
        if death.revive is not None:
            death.revive(self._served)
        streams = load.join()
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s and not (
            prober.settled(killed_s) and time.monotonic() > killed_s + death.watch_s
        ):
            time.sleep(0.1)
        settled = prober.settled(killed_s)
        probes = prober.stop()
        left = self._leftovers(victim, before, groups, shared) if settled else ["no service"]
        back = read_return(self._served.folder, killed)
        return self._found(death, streams, probes, killed_s, left, back, settled=settled)

    def _all_answer(self) -> bool:
        """A replica's processes may exist before it has loaded."""
        if self._setup.replicas == 1:
            return self._served.answers()
        return self._served.replicas_up() == self._setup.replicas

    def _cast(self) -> Counter[str]:
        """The number of processes of each kind: Ray's by their class, whatever they are doing."""
        return Counter(
            command.split()[0].partition(".")[0] if command.startswith("ray::") else command.split()[0]
            for _, command in self._served.processes()
            if _lasts(command)
        )

    def _leftovers(self, victim: int, before: Counter[str], groups: list[str], shared: set[str]) -> list[str]:
        """The processes in excess of those before, once their number is stable."""

        def more() -> list[str]:
            held = len(self._served.groups()) - len(groups)
            found = [f"{count} x {name}" for name, count in (self._cast() - before).items()]
            found += [f"{held} placement group(s)"] if held > 0 else []
            found += [f"shared memory {name}" for name in sorted(forgotten_since(shared))]
            return found + (["the killed process"] if alive(victim) else [])

        deadline_s = time.monotonic() + 60.0
        while (left := more()) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        return left

    def _found(
        self,
        death: Death,
        streams: Sequence[Stream],
        probes: Sequence[Probe],
        killed_s: float,
        left: list[str],
        back: Return,
        *,
        settled: bool,
    ) -> Found:
        ends = Counter(stream.end for stream in streams)
        same = sum(s.end == "whole" and s.text == text for s, text in zip(streams, self.texts, strict=True))
        waits = [wait for s in streams if (wait := s.next_after(killed_s)) is not None]
        after = [probe for probe in probes if probe.end_s > killed_s]
        failed = [probe for probe in after if probe.said != "200"]
        good = [p for p in after if p.begin_s > max([killed_s, *(f.begin_s for f in failed)])]
        return Found(
            setup=self._setup.name,
            death=death.name,
            replicas=self._setup.replicas,
            streams=self._count,
            same=same,
            other=ends["whole"] - same,
            resumed=sum(stream.resumed > 0 for stream in streams),
            errors=ends["error"],
            cut=ends["cut"],
            refused=ends["refused"],
            late=ends["late"],
            retryable=sum(s.error.get("code") == 503 for s in streams),
            next_event_s=round(max(waits), 2) if waits else None,
            service_s=round(good[0].end_s - killed_s, 2) if settled else None,
            refused_probes=dict(Counter(probe.said for probe in failed)),
            left=left,
            load_s=round(self._served.load_s, 1),
            has_the_clients=death.has_the_clients,
            has_gateway=self._setup.has_gateway,
            is_stop=death.signal is signal.SIGSTOP,
            back=back,
        )


def _lasts(command: str) -> bool:
    """Whether Ray keeps such a process: idle workers start and end."""
    return not command.startswith("ray::IDLE") and "default_worker.py" not in command


def any_of(role: str) -> Callable[[Served], int]:
    """The oldest one, which has streams."""
    return lambda served: served.pids(role)[0]


def busiest(role: str) -> Callable[[Served], int]:
    """The one that has used most of the CPU: of two gateways, one gets all streams."""
    return lambda served: max(served.pids(role), key=_cpu_ticks)


def _cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def raylet_of_a_replica(served: Served) -> int:
    stat = Path(f"/proc/{served.pids('replica')[0]}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def restart_the_gcs(served: Served) -> None:
    served.restart_gcs()


WORKER = Death("a target worker", any_of("target worker"))
RANK = Death("a TP rank", any_of("target worker"))
DRAFTER = Death("the split drafter", any_of("drafter"))
REPLICA = Death("the replica", any_of("replica"))
GATEWAY = Death("the gateway", busiest("gateway"), has_the_clients=True)
STOPPED_GATEWAY = replace(GATEWAY, name="the gateway, stopped", signal=signal.SIGSTOP)
HAPROXY = Death("HAProxy", any_of("haproxy"), has_the_clients=True)
CONTROLLER = Death("Serve's controller", any_of("controller"))
RAYLET = Death("the raylet of a replica's node", raylet_of_a_replica, watch_s=30.0)
GCS = Death("the head's GCS, permanently", any_of("gcs"), watch_s=90.0)
GCS_BACK = Death("the head's GCS, restarted", any_of("gcs"), watch_s=30.0, revive=restart_the_gcs)

SCHEDULE = (
    Setup("one replica", (WORKER, REPLICA, HAPROXY, CONTROLLER)),
    Setup("one replica behind a gateway", (WORKER, REPLICA, GATEWAY, HAPROXY), {"replicas": "1:1"}),
    Setup("one replica, TP 2, split", (DRAFTER, RANK), {"tensor_parallel_size": 2}, split=True),
    Setup("two replicas", (WORKER, REPLICA, GATEWAY, STOPPED_GATEWAY, HAPROXY, CONTROLLER), replicas=2),
    Setup(
        "two replicas, two nodes, Ray's tables on disk",
        (GCS_BACK, RAYLET),
        replicas=2,
        nodes=(4, 4),
        storage=True,
    ),
    Setup("two replicas, two nodes", (GCS,), replicas=2, nodes=(4, 4)),
)


def settings_of(setup: Setup, pair: tuple[Path, Path]) -> dict[str, Any]:
    """Engine settings: small, with slots for all streams."""
    placement = {"placement": "split"} if setup.split else {}
    return {
        "model": str(pair[0]),
        "speculative_config": {"model": str(pair[1]), **placement},
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": STREAMS + 4,
        "num_pages": 1024,
        "num_threads": 1,
        "log_format": "json",
        **setup.settings,
    }


@contextmanager
def serving(setup: Setup, pair: tuple[Path, Path], folder: Path) -> Iterator[Served]:
    log = folder / "server.log"
    with Served(
        settings_of(setup, pair), log, replicas=setup.replicas, nodes=setup.nodes, storage=setup.storage
    ) as served:
        yield served


def run_schedule(schedule: Sequence[Setup], pair: tuple[Path, Path], folder: Path) -> Iterator[Found]:
    for setup in schedule:
        with serving(setup, pair, folder) as served:
            trial = Trial(setup, served)
            for death in setup.deaths:
                found = trial.run(death)
                if death is setup.deaths[-1]:
                    left = served.end()
                    found = replace(found, left=[*found.left, *(f"after the end: {what}" for what in left)])
                print(row(found), flush=True)
                yield found


COLUMNS = (
    *(
        "killed",
        "streams: same text",
        "resumed",
        "error event",
        "cut",
        "refused",
        "next event s",
        "service s",
    ),
    *("noticed", "began", "loaded", "ready"),
    *("new requests meanwhile", "left behind", "bar"),
)


def row(found: Found) -> str:
    """The table's rows, in Markdown."""
    refused = ", ".join(f"{count} x {said}" for said, count in found.refused_probes.items())
    cells = [
        found.death,
        f"{found.same} of {found.streams}" + (f", {found.other} WITH ANOTHER TEXT" if found.other else ""),
        *(str(found.resumed), str(found.errors), str(found.cut), str(found.refused)),
        "-" if found.next_event_s is None else f"{found.next_event_s:.1f}",
        "never" if found.service_s is None else f"{found.service_s:.1f}",
        *("-" if seconds is None else f"{seconds:.1f}" for seconds in asdict(found.back).values()),
        refused or "all answered",
        "; ".join(found.left) or "nothing",
        "held" if found.held else "not held",
    ]
    return "| " + " | ".join(cells) + " |"


def table(found: Sequence[Found]) -> str:
    """The whole page."""
    lines = [
        "# Cost of failures",
        "",
        f"Written by `make chaos`: {STREAMS} streams are open when a process is killed with SIGKILL. *Next"
        " event* is the longest time that a stream waited for a token or its end, *service* the time until a"
        " new request was answered and all later ones were. By the server's log, the dead engine was"
        " *noticed* meanwhile, and its replacement *began*, had *loaded* and was *ready*. The bar:"
        " with two replicas no request is lost; with one, every stream gets a retryable error"
        f" immediately, and service is back within {BAR_S:g} s plus loading."
        " The death of HAProxy or the gateway cuts its connections; service is back within"
        f" {PROXY_BAR_S:g} s. In these rows clients send `X-Resumable: true`, and after the death their"
        " request again with `Last-Event-ID`: *resumed* streams continue behind a gateway with the same"
        " tokens ([how](decisions/gateway.md)), which are computed again, so no dead process is needed."
        " Clients that do not, and those of a single replica without a gateway, are cut; they send their"
        " request again without that header, and get another answer, or with an `Idempotency-Key` behind a"
        " gateway the same one from its beginning. So do clients of answers without a stream: a replica"
        " stops an answer when its connection breaks, because it cannot tell a dead gateway from a client"
        " that has left, and no process keeps finished ones; a repeated request is computed again."
        " Streams of several completions, with log probabilities or with the prompt have no ids."
        " A stopped gateway (SIGSTOP) is silent until it is replaced; a client notices that by a time"
        " limit of 20 s, because"
        " keep-alive comments come every 15 s. Kept is what replicas compute of other streams, and all of"
        " `/v1/batches`; metrics of the gateway, its records of poison requests and counts of"
        " `max_requests_per_key` begin anew. Nothing is left behind."
        " A single replica without a gateway has no process that could notify its streams: they are cut"
        " at once, which client libraries raise as a connection error (OpenAI's as `APIConnectionError`).",
    ]
    for setup in dict.fromkeys(each.setup for each in found):
        rows = [each for each in found if each.setup == setup]
        lines += ["", f"## {setup[0].upper()}{setup[1:]}", ""]
        lines += [f"Loading takes {rows[0].load_s:g} s.", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), *map(row, rows)]
    return "\n".join(lines) + "\n"


def main(output: Path, only: Sequence[str]) -> None:
    order = [setup.name for setup in SCHEDULE]
    if unknown := [name for name in only if name not in order]:
        raise SystemExit(f"no setup is named {unknown[0]!r}; they are {', '.join(order)}")
    made_by = dict.fromkeys(only or order, provenance())
    schedule, found = [setup for setup in SCHEDULE if setup.name in made_by], list[Found]()
    if only:
        known = json.loads(output.with_suffix(".json").read_text())
        found += [_read(each) for each in known["deaths"] if each["setup"] not in made_by]
        made_by = {**known["provenance"], **made_by}
    with tempfile.TemporaryDirectory() as scratch:
        pair = make_text_pair(Path(scratch))
        found += run_schedule(schedule, pair, Path(scratch))
    found.sort(key=lambda each: order.index(each.setup))
    output.with_suffix(".md").write_text(table(found))
    figures = {"provenance": made_by, "deaths": [{**asdict(each), "held": each.held} for each in found]}
    output.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


def _read(each: dict[str, Any]) -> Found:  # Any: JSON
    fields = {name: value for name, value in each.items() if name != "held"}
    return Found(**{**fields, "back": Return(**each["back"])})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
