"""A batch job for tests of deaths: its executor counts its tokens and dies of certain rows.

As a script (`paths.module_command`) it is such a job in a process of its own, with its fields as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manta.actors.engine.uniproc_executor import make_executor
from manta.cluster.batch.engine_pool_size import Concurrency
from manta.cluster.config import EngineConfig
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor
from manta.cluster.step.executor import DrafterHealth, Executor, ExecutorInfo
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult
from manta.jobs.batch.options import BatchOptions

from support.paths import module_command

STEP_S = 0.005
KILLER = [7, 7, 7, 7]  # a prompt


class CountingExecutor:
    """Another executor, every token of which adds a byte to a file. A certain prompt kills the process.

    Args:
        counter: the file; None counts nothing.
    """

    def __init__(self, inner: Executor, counter: str | None) -> None:
        self._inner = inner
        self._file = None if counter is None else os.open(counter, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    @property
    def info(self) -> ExecutorInfo:
        return self._inner.info

    @property
    def drafter_health(self) -> DrafterHealth:
        return self._inner.drafter_health

    def submit(self, plan: SchedulerOutput) -> None:
        if any(request.token_ids.tolist()[: len(KILLER)] == KILLER for request in plan.admitted):
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        if self._file is not None:
            os.write(self._file, b"." * int(result.num_tokens.sum()))
        return result

    def check_health(self) -> None:
        self._inner.check_health()

    def close(self) -> None:
        self._inner.close()


def make_counting(config: EngineConfig, counter: str | None = None, simulated: bool = True) -> Executor:
    """The arguments of `run_batch`, bound except for the first, to pass as `make`."""
    if not simulated:
        return CountingExecutor(make_executor(config), counter)
    info = ExecutorInfo(
        num_pages=(512,),
        page_size=16,
        max_model_len=256,
        vocab_size=384,
        eos_token_ids=(),
        num_speculative_tokens=0,
        dtype="float32",
        device="cpu",
    )
    cost = LinearCost(verify_floor_s=STEP_S)
    return CountingExecutor(SimulatedExecutor(info, cost=cost, spend=time.sleep), counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosJob:
    """Run a file's rows through an executor that counts its tokens in another file."""

    model: str
    input: str
    output: str
    counter: str | None = None
    simulated: bool = True
    concurrency: str = "1"
    max_num_seqs: int = 4
    max_tokens: int = 8
    preserve_order: bool = False
    tensor_parallel_size: int = 1

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            dtype="float32",
            device="cpu",
            max_num_seqs=self.max_num_seqs,
            max_model_len=256,
            num_threads=1,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    @property
    def options(self) -> BatchOptions:
        return BatchOptions(
            input=(self.input,),
            output=self.output,
            output_format="parquet",
            concurrency=Concurrency.parse(self.concurrency),
            sampling={"max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 1.0},
            preserve_order=self.preserve_order,
        )

    @property
    def make(self) -> Callable[[EngineConfig], Executor]:
        return functools.partial(make_counting, counter=self.counter, simulated=self.simulated)

    def run(self) -> None:
        from manta.jobs.batch.job import run_batch

        run_batch(self.config, self.options, make=self.make)

    def command(self) -> list[str]:
        """The same in its own process."""
        return module_command("support.jobs.chaos_job", [json.dumps(asdict(self))])


def write_rows(path: Path, num_rows: int, killers: tuple[int, ...] = ()) -> None:
    """Rows whose prompts are token ids; the named ones kill."""
    rows: list[dict[str, Any]] = [
        {"id": f"r{i}", "prompt": KILLER if i in killers else [i % 300 + 8, i // 300 + 8, 9]}
        for i in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    ChaosJob(**json.loads(sys.argv[1])).run()
