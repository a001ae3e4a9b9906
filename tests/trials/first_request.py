"""Measure speculation from the first token on, and how long `manta serve` takes to be ready.

    python tests/trials first_request docs/benchmarks/first-request-cpu.json  (20 minutes, on an idle machine)

For each interface (`LLM` in a process, HTTP) and each state of the cache of earlier starts, fresh processes
answer a prompt as their first request, then a dozen others, and the first one again. Each process begins
with another prompt, because the drafter predicts some texts nearly completely. `off` is plain decoding;
`fresh` has no cache, `kept` that of an undisturbed earlier process, `stale` the same with drafting ten times
as expensive and drafts that are rarely accepted, as after a busy machine or other text. The speed-up of a
request is its time in `off` divided by its time in another state.

The bars: the first request has 0.9 of the steady acceptance length and of the steady speed-up; a server is
ready within 10 s.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from manta.jobs.bench.common.provenance import provenance
from support.paths import MODELS
from support.servers.served import Served

PROCESSES, SERVERS = 10, 5
NUM_OTHERS, MAX_TOKENS = 12, 128
STATES = ("off", "fresh", "kept", "stale")  # `off` first: the others are compared with it
Runs = list[dict[str, list[float]]]
PROCESS = """
import json, sys, time
from manta import LLM, SamplingParams
models, prompts = sys.argv[1], json.loads(sys.argv[2])
def ask(prompt, **more):
    before, begin_s = llm.stats(), time.perf_counter()
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True), **more)
    seconds, after = time.perf_counter() - begin_s, llm.stats()
    return [after.generation_tokens - before.generation_tokens, after.steps - before.steps, seconds]
if __name__ == "__main__":
    spec = {"method": "dflash", "model": models + "/drafter"} if sys.argv[4] != "off" else None
    with LLM(models + "/target", speculative_config=spec, enable_prefix_caching=False) as llm:
        first = ask(prompts[0])
        for prompt in prompts[1:]:
            ask(prompt)
        print(json.dumps({"first": first, "steady": ask(prompts[0])}))
"""


def read_prompts() -> list[str]:
    """Prompts for which the shipped drafter is about as good as on average."""
    lines = map(json.loads, (MODELS / "prompts.jsonl").read_text().splitlines())
    texts = [line["prompt"] for line in lines if line.get("category") == "function_body"]
    return texts[: 1 + NUM_OTHERS]


def rotated(prompts: list[str], count: int) -> list[str]:
    return prompts[count:] + prompts[:count]


def spoil(cache: Path) -> None:
    """Write the measurements of a busy moment into the saved ones."""
    for file in cache.glob("*.json"):
        kept = json.loads(file.read_text())
        value = kept["value"]
        if file.name.startswith("step-costs"):
            value["draft"]["seconds"] = [10 * seconds for seconds in value["draft"]["seconds"]]
        if file.name.startswith("acceptance"):
            value["theta"][0] -= 3.0
            value["accepted"] = [share / 5 for share in value["accepted"]]
        file.write_text(json.dumps(kept))


class Cache:
    """The folder of saved measurements, brought into a state before each process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._good = folder / "cache", folder / "good"

    def save(self) -> None:
        shutil.copytree(self._folder, self._good)

    def prepare(self, state: str) -> Path:
        for file in self._folder.glob("*.json"):
            if not file.name.startswith("cpu-ways"):  # how loops are run, which is no belief
                file.unlink()
        if state != "fresh":
            shutil.copytree(self._good, self._folder, dirs_exist_ok=True)
        if state == "stale":
            spoil(self._folder)
        return self._folder


def run_process(cache: Path, state: str, prompts: list[str]) -> dict[str, list[float]]:
    environment = {**os.environ, "MANTA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROCESS, str(MODELS), json.dumps(prompts), str(MAX_TOKENS), state]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_server(
    cache: Path, state: str, log: Path, prompts: list[str]
) -> tuple[dict[str, list[float]], float]:
    """The same over HTTP, and the seconds until the server was ready."""
    os.environ["MANTA_CACHE_DIR"] = str(cache)
    settings: dict[str, Any] = {"model": str(MODELS / "target"), "enable_prefix_caching": False}  # Any: JSON
    if state != "off":
        settings["speculative_config"] = {"method": "dflash", "model": str(MODELS / "drafter")}
    begin_s = time.monotonic()
    with Served(settings, log, cpus=os.cpu_count() or 1) as served:
        ready_s = time.monotonic() - begin_s

        def ask(prompt: str, **more: Any) -> list[float]:  # Any: JSON
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **more}
            request = urllib.request.Request(
                f"{served.url}/v1/completions",
                json.dumps({**body, "stream": True}).encode(),
                {"Content-Type": "application/json"},
            )
            begin_s = time.perf_counter()
            with urllib.request.urlopen(request, timeout=60) as answer:
                num_events = sum(line.startswith(b"data: {") for line in answer)
            return [MAX_TOKENS, num_events, time.perf_counter() - begin_s]

        first = ask(prompts[0])
        for prompt in prompts[1:]:
            ask(prompt)
        return {"first": first, "steady": ask(prompts[0])}, ready_s


def summarize(runs: Runs, off: Runs) -> dict[str, float]:
    """Medians: tokens per step (or event) and seconds, of the first request and of the steady one.

    Args:
        off: the runs of plain decoding, of the same prompts in the same order.
    """
    figures, pairs = dict[str, float](), list(zip(runs, off, strict=True))
    for when in ("first", "steady"):
        figures[f"{when}_tokens_per_step"] = round(median(run[when][0] / run[when][1] for run in runs), 3)
        figures[f"{when}_s"] = round(median(run[when][2] for run in runs), 4)
        figures[f"{when}_speedup"] = round(median(plain[when][2] / run[when][2] for run, plain in pairs), 3)
    length = median(run["first"][0] / run["first"][1] * run["steady"][1] / run["steady"][0] for run in runs)
    figures["first_by_steady_length"] = round(length, 3)
    figures["first_by_steady_speed"] = round(median(run["steady"][2] / run["first"][2] for run in runs), 3)
    figures["first_by_steady_speedup"] = round(figures["first_speedup"] / figures["steady_speedup"], 3)
    return figures


def main(output: Path) -> int:
    figures: dict[str, Any] = {"provenance": provenance()}  # Any: JSON
    prompts = read_prompts()
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        run_process(cache.prepare("fresh"), "fresh", prompts)  # compiles loops
        cache.save()
        off: Runs = []
        for state in STATES:
            runs = [run_process(cache.prepare(state), state, rotated(prompts, k)) for k in range(PROCESSES)]
            off = off or runs
            figures[f"LLM, {state}"] = summarize(runs, off)
            print(f"LLM, {state}", figures[f"LLM, {state}"], flush=True)
        ready, off = list[float](), []
        for state in STATES:
            served = [
                run_server(cache.prepare(state), state, Path(folder) / "log", rotated(prompts, k))
                for k in range(SERVERS)
            ]
            ready += [ready_s for _, ready_s in served]
            runs = [run for run, _ in served]
            off = off or runs
            figures[f"HTTP, {state}"] = summarize(runs, off)
            print(f"HTTP, {state}", figures[f"HTTP, {state}"], flush=True)
        figures["ready_s"] = {"median": round(median(ready), 1), "most": math.ceil(10 * max(ready)) / 10}
    print("ready", figures["ready_s"])
    output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
