"""Sides of `benchmarks batch`: a batch job, `manta.LLM`, HTTP, and `generate` on Ray Data.

Each runs alone and loads its models for its turn. Its time is from the start of the first row to the end of
the last, without loading; the start of a job is a separate figure.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from manta.actors.batch.dataset.storage import Storage
from manta.actors.system.host_resources import owned_cores
from manta.actors.targets.loading.load_plan import plan_load
from manta.cluster.config import EngineConfig
from manta.cluster.errors import MantaError
from manta.cluster.request.request import SamplingParams
from manta.jobs.bench.common.engine_passes import Pass, Prompt, run_engine, say, tried_dtypes
from manta.jobs.common.generate import open_llm
from manta.jobs.common.ray_session import join_or_start_ray
from manta.jobs.demo import log_tail, manta

from ..comparison.contender_server import OpenAIServer
from ..comparison.contenders import ContenderSetup, HuggingFaceGenerate, TransformersTarget
from ..serving.own_server import manta_serve, write_settings

POLL_S = 0.02
WARM_UP_TOKENS = 8
GENERATE_AT_ONCE = 8
SURPLUS = 1.25  # HTTP concurrency relative to max_num_seqs, so that the engine never waits for the client


@dataclass
class JobPass(Pass):
    """A pass of a batch job.

    Attributes:
        first_row_s: seconds from the start of the command until a result was on disk.
        busy_share: share of the engines' time between their first and last row; None if unknown.
    """

    first_row_s: float = 0.0
    busy_share: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """The rows of a pass and the folder for its files."""

    prompts: Sequence[Prompt] = field(repr=False)
    max_tokens: int
    scratch: Path

    @property
    def token_ids(self) -> list[list[int]]:
        return [token_ids for _, token_ids in self.prompts]


class JobSide:
    """`manta batch` in its own process."""

    def __init__(self, config: EngineConfig, engines: int = 1) -> None:
        self._config, self._engines = config, engines
        self.name = "manta batch" + (f", {engines} engines" if engines > 1 else "")

    def run(self, work: Work) -> JobPass:
        folder = work.scratch / "job"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        rows = folder / "rows.jsonl"
        with rows.open("w", encoding="utf-8") as lines:
            for name, token_ids in work.prompts:
                lines.write(json.dumps({"id": name, "prompt": token_ids}) + "\n")
        arguments = [
            "batch",
            "-i",
            str(rows),
            "-o",
            str(folder / "out"),
            "--config",
            str(write_settings(self._config, folder)),
        ]
        arguments += ["--concurrency", str(self._engines), "--max-tokens", str(work.max_tokens)]
        begin_s = time.monotonic()
        first_s = _run(
            manta(*arguments, "--temperature", "0", "--ignore-eos"), folder / "log", folder / "out"
        )
        report = json.loads((folder / "out" / "_report.json").read_text(encoding="utf-8"))
        return JobPass(
            seconds=report["wall_s"],
            tokens=report["completion_tokens"],
            token_ids=_answers(folder / "out", work),
            first_row_s=first_s - begin_s,
            busy_share=report.get("busy_share"),
        )


class LlmSide:
    """`manta.LLM` in this process with all rows in one call."""

    name = "manta.LLM"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def run(self, work: Work) -> Pass:
        with open_llm(self._config) as llm:
            warm = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
            llm.generate(work.token_ids[: self._config.max_num_seqs], warm, use_tqdm=False)
            params = SamplingParams(temperature=0.0, max_tokens=work.max_tokens, ignore_eos=True)
            return run_engine(llm, work.token_ids, [params] * len(work.prompts))


class HttpSide:
    """`manta serve` with a client that sends each row."""

    name = "HTTP"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def run(self, work: Work) -> Pass:
        with manta_serve(self._config, work.scratch) as url:
            at_once = int(SURPLUS * self._config.max_num_seqs)
            (run,) = OpenAIServer(url).setups(at_once).values()
            run(work.token_ids[: self._config.max_num_seqs], WARM_UP_TOKENS)
            return run(work.token_ids, work.max_tokens)


class GenerateSide:
    """Ray Data with one actor that runs Hugging Face `generate` in batches, in its faster dtype."""

    name = "Ray Data, Hugging Face generate"

    def __init__(self, config: EngineConfig) -> None:
        plan = plan_load(config)
        threads = config.num_threads or owned_cores()
        self._arguments = (str(plan.target_folder), plan.device.type, tried_dtypes(config), threads)

    def run(self, work: Work) -> Pass:
        started_here = join_or_start_ray(log_to_driver=False)
        import ray
        import ray.data

        try:
            context = ray.data.DataContext.get_current()
            shown, context.enable_progress_bars = context.enable_progress_bars, False
            rows = [{"row": i, "prompt": token_ids} for i, token_ids in enumerate(work.token_ids)]
            answered = ray.data.from_items(rows, override_num_blocks=1).map_batches(
                _GenerateActor,
                fn_constructor_args=(*self._arguments, work.max_tokens),
                batch_size=GENERATE_AT_ONCE,
                batch_format="pandas",
                num_gpus=1 if self._arguments[1] == "cuda" else 0,
                compute=ray.data.ActorPoolStrategy(size=1),
            )
            found = sorted(answered.take_all(), key=lambda row: row["row"])
            context.enable_progress_bars = shown
        finally:
            if started_here:
                ray.shutdown()
        answers = [list(map(int, row["answer"])) for row in found]
        seconds = max(row["end_s"] for row in found) - min(row["begin_s"] for row in found)
        return Pass(seconds, sum(map(len, answers)), answers)


class _GenerateActor:
    """Callable for `map_batches`. The first batch chooses the dtype, before the measurement starts."""

    def __init__(
        self, folder: str, device: str, dtypes: Sequence[str], num_threads: int, max_tokens: int
    ) -> None:
        torch.set_num_threads(num_threads)
        target = TransformersTarget(Path(folder), torch.device(device))
        self._setups = HuggingFaceGenerate(target, dtypes).setups(GENERATE_AT_ONCE)
        self._dtypes = dtypes
        self._max_tokens = max_tokens
        self._setup: ContenderSetup | None = None

    def __call__(self, batch: Any) -> Any:  # Any: a pandas frame
        prompts = [list(map(int, prompt)) for prompt in batch["prompt"]]
        if self._setup is None:
            self._setup = self._fastest(prompts)
        begin_s = time.time()
        done = self._setups[self._setup](prompts, self._max_tokens)
        assert done.token_ids is not None
        answers = [np.asarray(answer) for answer in done.token_ids]
        return batch[["row"]].assign(answer=answers, begin_s=begin_s, end_s=time.time())

    def _fastest(self, prompts: list[list[int]]) -> ContenderSetup:
        def speed(setup: ContenderSetup) -> float:
            self._setups[setup](prompts, 1)  # loads the model
            return self._setups[setup](prompts, WARM_UP_TOKENS).tokens_per_s

        return max(
            (ContenderSetup(dtype, GENERATE_AT_ONCE, "sdpa, dynamic cache") for dtype in self._dtypes),
            key=speed,
        )


def _run(command: Sequence[str], log: Path, output: Path) -> float:
    """Run a job; return the monotonic time at which its first result was in the output."""
    first_s = None
    storage = Storage.open(str(output), field="output")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while process.poll() is None:
                if first_s is None and _has_results(storage):
                    first_s = time.monotonic()
                    say("the first row is answered")
                time.sleep(POLL_S if first_s is None else 10 * POLL_S)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise MantaError(f"manta batch exited with code {process.returncode}:\n{log_tail(log)}")
    return time.monotonic() if first_s is None else first_s


def _has_results(output: Storage) -> bool:
    """Return whether the output has a segment or a part."""
    return bool(output.entries("_manta/pending", recursive=True)) or any(
        entry.name.startswith("part-") for entry in output.entries()
    )


def _answers(output: Path, work: Work) -> list[list[int]]:
    """Return the token ids in the order of the rows."""
    found: dict[str, list[int]] = {}
    for part in sorted(output.glob("part-*.jsonl")):
        with part.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                found[row["id"]] = row["token_ids"]
    if missing := [name for name, _ in work.prompts if name not in found]:
        raise MantaError(f"manta batch answered {len(found)} rows; {missing[0]} is not among them.")
    return [found[name] for name, _ in work.prompts]
