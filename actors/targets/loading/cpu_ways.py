"""Which way of computing is the fastest on this CPU: tried at an engine's first start, and kept on the disk.

A *way* is a backend and a dtype. Those that give a row the same bits in any batch are timed on one block of
middling size: one row, a block's rows, a prompt's. Of those that a model can run and the settings allow the
fastest is taken. What `backends.py` chooses by itself stays where nothing was measured or is faster by much:
dtypes differ in their last bits, and noise must not settle which tokens come.

    executor.py ──try_ways──▶ a file for each CPU, instructions, threads, code ──choose_way──▶ plan.py

Legend: N rows, H hidden.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ....cluster.config import EngineConfig
from ....cluster.kept import Kept
from ....drafter.compute.backend import Backend, Machine, StackSpec
from ....drafter.compute.invariance import TrialBlock, rows_are_invariant
from ...machine import cpu_name, owned_cores
from .backends import (
    BackendName,
    choose_backend,
    choose_dtype,
    instructions_of_passes,
    take_cpu,
    why_not,
)

logger = logging.getLogger(__name__)

_HIDDEN, _INNER = 768, 2048
_CASES = ((300, 1), (300, 16), (0, 256))  # tokens known, rows
_ROUNDS, _MOST_S = 5, 0.2  # of each way, once its code is compiled
_BETTER = 0.9  # of the seconds of what would be chosen by itself
# A model larger than that is not widened: its weights come from memory in each step, a block's from a cache.
_MOST_WIDENED_BYTES = 2**30
_TRIED = StackSpec(name="trial", sizes=frozenset({_HIDDEN, _INNER}), head_dims=frozenset({64}))


class Way(NamedTuple):
    """As settings name them; "torch" with compiled loops between its products."""

    backend: BackendName
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        return f"{self.backend} {self.dtype_name}"

    def runs(self, models: Sequence[StackSpec], machine: Machine) -> bool:
        """Whether it can compute these."""
        room = "loops" if self.backend == "torch" else self.backend
        return why_not(room, models, replace(machine, dtype=self.dtype)) is None


WAYS = (Way("compiled", torch.bfloat16), Way("torch", torch.bfloat16), Way("torch", torch.float32))


def choose_way(
    config: EngineConfig, models: Sequence[StackSpec], checkpoint: str, machine: Machine, num_values: int
) -> Way:
    """As asked; by itself the fastest.

    Args:
        checkpoint: the target's dtype.
        machine: its dtype is what a CPU would like best.
        num_values: of the target's weights.
    """
    dtype = choose_dtype(config, models, checkpoint, machine)
    default = Way(choose_backend(config, models, replace(machine, dtype=dtype)), dtype)
    if default not in WAYS or machine.device.type != "cpu" or config.needs_ray:
        return default  # workers must agree, and each would look at a machine of its own

    def is_possible(way: Way) -> bool:
        asked = config.attention_backend in ("auto", way.backend) and config.dtype in ("auto", way.dtype_name)
        widened = way.dtype.itemsize > dtype.itemsize
        fits = not widened or way.dtype.itemsize * num_values <= _MOST_WIDENED_BYTES
        return asked and fits and way != default and way.runs(models, machine)

    others = [way for way in WAYS if is_possible(way)]
    return fastest(default, others, measured(config.num_threads or owned_cores())) if others else default


class Timed(NamedTuple):
    """Seconds of a block, and whether it is known that a row's bits do not depend on its batch."""

    seconds: float
    exact: bool


def fastest(default: Way, others: Collection[Way], found: Mapping[Way, Timed]) -> Way:
    """Of these ways, by what was measured of them; `default` where that tells nothing."""
    if default not in found:
        return default
    exact = [way for way in others if way in found and found[way].exact]
    best = min(exact, key=lambda way: found[way].seconds, default=default)
    return best if found[best].seconds < _BETTER * found[default].seconds else default


def measured(num_threads: int) -> dict[Way, Timed]:
    """What is kept; empty where nothing is, or what there is makes no sense."""
    value = _kept(num_threads).read()
    if not isinstance(value, Mapping) or not all(map(_makes_sense, value.values())):
        return {}
    return {way: Timed(*value[way.name]) for way in WAYS if way.name in value}


def try_ways(num_threads: int) -> None:
    """Measure them unless that was done. PyTorch's threads are as many now, and again after it."""
    if measured(num_threads):
        return
    machine = Machine(torch.device("cpu"), torch.float32, page_size=16, num_ranks=1)
    seconds = {way: time_way(way, num_threads) for way in WAYS if way.runs([_TRIED], machine)}
    slowest = max(seconds.values(), default=0.0)
    # What is faster than nothing is nobody's choice: whether it is exact takes longer than all else here.
    found = {
        way.name: Timed(taken, taken < _BETTER * slowest and is_exact(way, num_threads))
        for way, taken in seconds.items()
    }
    times = ", ".join(f"{name} {1e3 * timed.seconds:.2f} ms" for name, timed in found.items())
    logger.info(
        "measured once for this machine: a block of a model on %d threads takes %s", num_threads, times
    )
    if not measured(num_threads):  # another process, which was first, chooses for both
        _kept(num_threads).write(found)


def is_exact(way: Way, num_threads: int) -> bool:
    """Whether a row's bits do not depend on its batch."""
    if way.backend == "compiled":  # by its code; a loaded rank looks at it all the same
        return True
    with _opened(way, num_threads) as backend:
        return rows_are_invariant(backend, way.dtype, "cpu")


def time_way(way: Way, num_threads: int) -> float:
    """Seconds of a block: of the fewest at each number of rows the geometric mean."""
    with torch.inference_mode(), _opened(way, num_threads) as backend:
        block = TrialBlock(backend, way.dtype, "cpu", hidden=_HIDDEN, inner=_INNER)
        inputs = [block.random(rows, _HIDDEN) for _, rows in _CASES]
        least = [math.inf] * len(_CASES)
        end_s = math.inf
        for turn in range(1 + _ROUNDS):
            if time.perf_counter() > end_s:
                break
            for i, ((known, rows), x_NH) in enumerate(zip(_CASES, inputs, strict=True)):
                begin_s = time.perf_counter()
                block.run(x_NH, [known], [rows])
                if turn:  # code is compiled in the first
                    least[i] = min(least[i], time.perf_counter() - begin_s)
            end_s = min(end_s, time.perf_counter() + _MOST_S)
    return math.prod(least) ** (1 / len(least))


@contextmanager
def _opened(way: Way, num_threads: int) -> Iterator[Backend]:
    """What computes in this way, with its threads."""
    try:
        yield take_cpu(way.backend)
    finally:
        torch.set_num_threads(num_threads)


def _kept(num_threads: int) -> Kept:
    subject = {
        "cpu": cpu_name(),
        "instructions": instructions_of_passes(),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "threads": num_threads,
        "code": _code(),
        "torch": torch.__version__,
    }
    return Kept("cpu-ways", subject)


@cache
def _code() -> str:
    """Of what computes, a digest: what was measured of other code counts for nothing."""
    folder = Path(__file__).parents[3] / "drafter" / "compute"
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()


def _makes_sense(kept: object) -> bool:
    match kept:
        case [float(seconds), bool()]:
            return 0.0 < seconds < math.inf
        case _:
            return False
