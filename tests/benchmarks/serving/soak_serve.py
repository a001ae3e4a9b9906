"""`make soak-serve`: a real server under realistic clients for minutes, and then under overload.

Streams of all lengths start and end; some clients disconnect early. At the end the server's memory must be
that after a fifth of the time, no request may have failed, and no page may be in use. Then four times as many
requests as the server accepts arrive at once: it must reject the surplus as OpenAI does, and continue the
others. `main` starts the server; `run_soak` and `overload` accept any server that this process started.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.request import urlopen

import typer
from manta.actors.system.atomic_files import write_json
from manta.actors.system.host_resources import free_port
from manta.jobs.bench.common.engine_passes import Figures, say
from manta.jobs.bench.common.provenance import provenance
from manta.jobs.common.server_process import serving
from manta.jobs.common.tables import print_table

from ..processes.process_clocks import resident_bytes
from .streams import Stream, StreamClient

CLIENTS = 32
LONGEST_TOKENS = 256
LEAVING_SHARE = 0.3  # of streams, abandoned by their client
WATCHED = ("worker", "replica", "haproxy")
GROWTH_BYTES = 32 * 2**20  # allowed growth of a role's memory
GROWTH_SHARE = 0.05
OVERLOAD = 4  # multiple of the requests that the server accepts
OVERLOAD_TOKENS = 128
SLOWER_BAR = 1.2  # allowed slowdown per token of accepted requests under overload
LOOK_EVERY_S = 0.5
REST_S = 60.0


def run_soak(url: str, seconds: float, clients: int = CLIENTS, pause_s: float = 0.0) -> Figures:
    """Run clients for `seconds`, each with one stream after another.

    Args:
        url: URL of a server whose processes are descendants of this one.
        pause_s: maximum pause of a client between two streams.
    """
    return asyncio.run(_soak(url, seconds, clients, pause_s))


def overload(url: str, running: int, waiting: int) -> Figures:
    """Send as many streams as run concurrently, then OVERLOAD times the accepted number.

    Args:
        running, waiting: limits of the server: `max_num_seqs`, `max_num_queued_reqs`.
    """
    return asyncio.run(_overload(url, running, waiting))


def complaints(found: Figures, growth_bytes: int = GROWTH_BYTES) -> list[str]:
    """Return the failures of a soak.

    Args:
        growth_bytes: allowed growth of a role's memory in addition to GROWTH_SHARE; the default is for a soak
            of minutes, in whose first fifths every shape of a step occurs.
    """
    said = [
        f"{count} streams ended as {end}"
        for end, count in found["ends"].items()
        if end not in ("whole", "left")
    ]
    for role, memory in found["memory"].items():
        allowed = growth_bytes + GROWTH_SHARE * memory["early"]
        if memory["late"] - memory["early"] > allowed:
            said.append(f"the memory of {role} grew from {memory['early']} to {memory['late']} bytes")
    said += [f"at rest {name} is {value:g}" for name, value in found["at_rest"].items() if value]
    return said


def overload_complaints(found: Figures) -> list[str]:
    """Return the failures under overload."""
    said = [
        f"{count} accepted streams ended as {end}" for end, count in found["ends"].items() if end != "whole"
    ]
    if not found["refused"]:
        said.append("nothing was refused: the queue has no limit")
    said += [f"{count} refusals were: {text}" for text, count in found["not_as_openai"].items()]
    if found["slower"] > SLOWER_BAR:
        said.append(f"a token took {found['slower']:.2f} x as long")
    return said


async def _soak(url: str, seconds: float, clients: int, pause_s: float) -> Figures:
    ends: Counter[str] = Counter()
    memory: list[dict[str, int]] = []
    until_s = time.monotonic() + seconds

    async def client(number: int) -> None:
        chance = random.Random(number)
        async with StreamClient(url) as connection:
            while time.monotonic() < until_s:
                tokens = chance.randint(1, LONGEST_TOKENS)
                leave_after = chance.randint(1, 8) if chance.random() < LEAVING_SHARE else None
                stream = await connection.ask(_body(chance.getrandbits(30), tokens), leave_after=leave_after)
                ends[str(stream.end)] += 1
                await asyncio.sleep(pause_s * chance.random())

    async def look() -> None:
        while time.monotonic() < until_s:
            memory.append(resident_bytes())
            await asyncio.sleep(LOOK_EVERY_S)

    await asyncio.gather(look(), *(client(i) for i in range(clients)))
    return {
        "seconds": seconds,
        "clients": clients,
        "ends": dict(ends),
        "memory": {role: _growth([each[role] for each in memory]) for role in WATCHED},
        "at_rest": await _at_rest(url),
    }


async def _overload(url: str, running: int, waiting: int) -> Figures:
    full = await _ask_at_once(url, running)
    many = await _ask_at_once(url, OVERLOAD * (running + waiting))
    refused = [stream for stream in many if stream.end == "refused"]
    taken = [stream for stream in many if stream.end != "refused"]
    wrong = Counter(
        f"{stream.status} {dict(stream.error)}" for stream in refused if not _is_as_openai(stream)
    )
    return {
        "asked": len(many),
        "refused": len(refused),
        "not_as_openai": dict(wrong),
        "ends": dict(Counter(str(stream.end) for stream in taken)),
        "token_ms": round(1e3 * _token_s(full), 3),
        "token_ms_overloaded": round(1e3 * _token_s(taken), 3),
        "slower": round(_token_s(taken) / _token_s(full), 3),
    }


async def _ask_at_once(url: str, count: int) -> list[Stream]:
    clients = [StreamClient(url) for _ in range(count)]
    try:
        return await asyncio.gather(
            *(client.ask(_body(i, OVERLOAD_TOKENS)) for i, client in enumerate(clients))
        )
    finally:
        for client in clients:
            client.close()


def _token_s(streams: Sequence[Stream]) -> float:
    """Return the median over streams of the seconds per token."""
    spent = [s.token_times_s[-1] - s.token_times_s[0] for s in streams if len(s.token_times_s) > 1]
    return statistics.median(spent) / OVERLOAD_TOKENS if spent else 0.0


def _is_as_openai(stream: Stream) -> bool:
    in_shape = stream.error.get("type") == "ServiceUnavailableError" and stream.error.get("code") == 503
    return in_shape and stream.status == 503 and float(stream.headers.get("retry-after", 0)) > 0


def _body(seed: int, max_tokens: int) -> dict[str, Any]:  # Any: JSON
    return {
        "prompt": f"def f{seed}(",
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
    }


def _growth(samples: Sequence[int]) -> dict[str, int]:
    """Return the median bytes of the second and of the last fifth of the time."""
    fifth = max(1, len(samples) // 5)
    return {
        "early": int(statistics.median(samples[fifth : 2 * fifth] or samples)),
        "late": int(statistics.median(samples[-fifth:])),
    }


async def _at_rest(url: str) -> dict[str, float]:
    """Return what the server still holds without requests; waits up to REST_S for zeros."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline_s = time.monotonic() + REST_S
    while True:
        text = await asyncio.to_thread(_get, f"{url}/metrics")
        lines = [line for line in text.splitlines() if line.startswith(names)]
        found = {line.partition("{")[0].split()[0]: float(line.split()[-1]) for line in lines}
        if not any(found.values()) or time.monotonic() > deadline_s:
            return found
        await asyncio.sleep(LOOK_EVERY_S)


def _get(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def main(
    minutes: Annotated[float, typer.Option("--minutes")] = 10.0,
    model: Annotated[Path, typer.Option("--model")] = Path("models/target"),
    drafter: Annotated[Path, typer.Option("--drafter")] = Path("models/drafter"),
    running: Annotated[int, typer.Option("--max-num-seqs")] = 16,
    waiting: Annotated[int, typer.Option("--max-num-queued-reqs")] = 32,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSON file for the figures.")] = None,
) -> None:
    """Serve, soak, overload; exit code 1 if memory grows, pages stay in use, or a stream fails."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["-m", str(model), "--spec-model", str(drafter), "--port", str(port), "--kv-tier-path", "none"]
    flags += ["--max-num-seqs", str(running), "--max-num-queued-reqs", str(waiting)]
    with (
        tempfile.TemporaryDirectory(prefix="manta-soak-") as scratch,
        serving(["serve", *flags], url, Path(scratch) / "serve.log"),
    ):
        soaked = run_soak(url, 60 * minutes)
        loaded = overload(url, running, waiting)
    if output is not None:
        write_json(output, {"provenance": provenance(), "soak": soaked, "overload": loaded})
    rows = [
        [name, str(value)]
        for name, value in {**soaked, **{f"overload: {k}": v for k, v in loaded.items()}}.items()
    ]
    print_table("soak", ["what", "found"], rows, num_left=2)
    if said := complaints(soaked) + overload_complaints(loaded):
        say("; ".join(said))
        raise typer.Exit(1)
