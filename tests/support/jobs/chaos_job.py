"""A batch job for tests of deaths: its executor counts its tokens and dies of certain rows.

From a number of tokens on its steps take seconds until the test releases them, so that what happens meanwhile
does not depend on the speed of the machine. As a script (`paths.module_command`) it is such a job in a
process of its own, with its fields as JSON.
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
from typing import Any, TypeAlias

from manta.actors.batch.row_stats import RowStats
from manta.actors.engine.uniproc_executor import make_executor
from manta.cluster.batch.engine_pool_size import Concurrency
from manta.cluster.config import EngineConfig
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor
from manta.cluster.step.clock import MACHINE_CLOCK
from manta.cluster.step.executor import Executor
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult
from manta.jobs.batch.options import BatchOptions
from ray import cloudpickle

from support.engines import passing_executor
from support.engines.cluster_checker import make_info
from support.engines.passing_executor import PassingExecutor
from support.paths import module_command
from support.waiting import wait_until

STEP_S, SLOW_STEP_S = 0.005, 2.0
KILLER = [7, 7, 7, 7]  # a prompt
SIZES = {"num_pages": (512,), "page_size": 16, "max_model_len": 256, "vocab_size": 384}
INFO = make_info(**SIZES, eos_token_ids=(), num_speculative_tokens=0)

for module in (sys.modules[__name__], passing_executor):
    cloudpickle.register_pickle_by_value(module)  # engines do not find tests


class CountingExecutor(PassingExecutor):
    """Another executor, every token of which adds a byte to a file. A certain prompt kills the process.

    Args:
        folder: of the file `counter`. Processes with slow steps are files `slow-PID`; `released` ends these.
        slow_from: the number of tokens from which each step takes SLOW_STEP_S.
    """

    def __init__(self, inner: Executor, folder: Path, slow_from: int | None) -> None:
        super().__init__(inner)
        self._folder, self._slow_from = folder, slow_from
        self._file = os.open(folder / "counter", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def submit(self, plan: SchedulerOutput) -> None:
        if any(request.token_ids.tolist()[: len(KILLER)] == KILLER for request in plan.admitted):
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        os.write(self._file, b"." * int(result.num_tokens.sum()))
        if self._slow_from is not None and os.fstat(self._file).st_size >= self._slow_from:
            (self._folder / f"slow-{os.getpid()}").touch()
            until_s = time.monotonic() + SLOW_STEP_S
            while not (self._folder / "released").exists() and time.monotonic() < until_s:
                time.sleep(0.01)
        return result


def make_counting(config: EngineConfig, folder: str, simulated: bool, slow_from: int | None) -> Executor:
    """The arguments of `run_batch`, bound except for the first, to pass as `make`."""
    if not simulated:
        return CountingExecutor(make_executor(config), Path(folder), slow_from)
    inner = SimulatedExecutor(INFO, cost=LinearCost(verify_floor_s=STEP_S), clock=MACHINE_CLOCK)
    return CountingExecutor(inner, Path(folder), slow_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosJob:
    """Run a file's rows through an executor that counts its tokens, with the output in the folder `out`."""

    model: str
    input: str
    folder: str
    slow_from: int | None = None
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
            output=str(self.out),
            output_format="parquet",
            concurrency=Concurrency.parse(self.concurrency),
            sampling={"max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 1.0},
            preserve_order=self.preserve_order,
        )

    @property
    def make(self) -> Callable[[EngineConfig], Executor]:
        return functools.partial(
            make_counting, folder=self.folder, simulated=self.simulated, slow_from=self.slow_from
        )

    @property
    def out(self) -> Path:
        return Path(self.folder) / "out"

    @property
    def num_tokens(self) -> int:
        """Tokens that executors have computed, also those of rows that were lost."""
        return (Path(self.folder) / "counter").stat().st_size

    def run(self) -> RowStats:
        from manta.jobs.batch.job import run_batch

        return run_batch(self.config, self.options, make=self.make).stats

    def command(self) -> list[str]:
        """The same in its own process."""
        return module_command("support.jobs.chaos_job", [json.dumps(asdict(self))])

    def wait_until_slow(self, engines: int, is_running: Callable[[], bool]) -> None:
        """Wait until so many engines have computed rows at slow steps."""
        wait_until(lambda: len(list(Path(self.folder).glob("slow-*"))) >= engines, is_running=is_running)

    def release(self) -> None:
        """End slow steps, of engines to come too."""
        (Path(self.folder) / "released").touch()


MakeJob: TypeAlias = Callable[..., ChaosJob]  # the fixture's type


def write_rows(path: Path, num_rows: int, killers: tuple[int, ...] = ()) -> None:
    """Rows whose prompts are token ids; the named ones kill."""
    rows: list[dict[str, Any]] = [
        {"id": f"r{i}", "prompt": KILLER if i in killers else [i % 300 + 8, i // 300 + 8, 9]}
        for i in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    ChaosJob(**json.loads(sys.argv[1])).run()
