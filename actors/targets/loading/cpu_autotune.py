"""Chooses a CPU's fastest backend and dtype, measured at an engine's first start and cached on disk.

Configurations with the same bits of a row in any batch are timed on a medium-sized block with one row, a
draft block's rows and a prompt's rows. The fastest one that the model and the settings allow is chosen. The
default of `backend_selection.py` stays if nothing was measured or no other one is clearly faster: dtypes
differ in their last bits, and timing noise must not decide which tokens come out.

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
from typing import Any, NamedTuple

import torch

from ....cluster.config import EngineConfig
from ....cluster.disk_cache import DiskCache
from ....drafter.compute.backend import Backend, DeviceCapabilities, ModelStackSpec
from ....drafter.compute.batch_invariance import TrialBlock, rows_are_invariant
from ...system.host_resources import cpu_name, owned_cores
from .backend_selection import (
    BackendName,
    choose_backend,
    choose_dtype,
    has_experts,
    instructions_of_passes,
    quantizes_to_integers,
    take_cpu,
    why_not,
)

logger = logging.getLogger(__name__)

_HIDDEN, _INNER = 768, 2048
_CASES = ((300, 1), (300, 16), (0, 256))  # (context tokens, rows)
# timed rounds of each configuration, and seconds after which they stop; the first run compiles
_ROUNDS, _MAX_S = 5, 0.2
_MAX_RELATIVE_TIME = 0.9  # share of the default's seconds below which another one replaces it
# Weights of a target with more bytes than this are not widened: each step reads them from memory, while those
# of the timed block come from a cache.
_MAX_WIDENED_BYTES = 2**30
_TRIAL_SPEC = ModelStackSpec(name="trial", sizes=frozenset({_HIDDEN, _INNER}), head_dims=frozenset({64}))


class CpuConfig(NamedTuple):
    """A backend and a dtype as settings name them; "torch" includes compiled loops between products."""

    backend: BackendName
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        return f"{self.backend} {self.dtype_name}"

    def runs(self, models: Sequence[ModelStackSpec], machine: DeviceCapabilities) -> bool:
        backend = "loops" if self.backend == "torch" else self.backend
        return why_not(backend, models, replace(machine, dtype=self.dtype)) is None


CPU_CONFIGS = (
    CpuConfig("compiled", torch.bfloat16),
    CpuConfig("torch", torch.bfloat16),
    CpuConfig("torch", torch.float32),
)


def choose_cpu_config(
    config: EngineConfig,
    models: Sequence[ModelStackSpec],
    checkpoint: str,
    machine: DeviceCapabilities,
    num_values: int,
    is_quantized: bool = False,
) -> CpuConfig:
    """Return the configuration in the settings, or else the fastest for a target of `num_values` weights.

    `checkpoint` is the target's dtype; `machine` has the dtype that a CPU prefers. `is_quantized`: the
    checkpoint is.
    """
    has_codes = quantizes_to_integers(config) or (is_quantized and has_experts(models))
    dtype = choose_dtype(config, models, checkpoint, machine, has_codes=has_codes)
    default = CpuConfig(choose_backend(config, models, replace(machine, dtype=dtype)), dtype)
    if default not in CPU_CONFIGS or machine.device.type != "cpu" or config.needs_ray:
        return default  # workers must agree, and each one would measure its own machine
    if has_codes:
        return default  # others have no products of codes, or were measured without them

    def is_possible(candidate: CpuConfig) -> bool:
        allowed = config.attention_backend in ("auto", candidate.backend) and config.dtype in (
            "auto",
            candidate.dtype_name,
        )
        widened = candidate.dtype.itemsize > dtype.itemsize
        fits = not widened or candidate.dtype.itemsize * num_values <= _MAX_WIDENED_BYTES
        return allowed and fits and candidate != default and candidate.runs(models, machine)

    others = [candidate for candidate in CPU_CONFIGS if is_possible(candidate)]
    return fastest(default, others, measured(config.num_threads or owned_cores())) if others else default


class Timed(NamedTuple):
    """Seconds of a block, and whether a row's bits are known not to depend on its batch."""

    seconds: float
    exact: bool


def fastest(
    default: CpuConfig, others: Collection[CpuConfig], timings: Mapping[CpuConfig, Timed]
) -> CpuConfig:
    if default not in timings:
        return default
    exact = [candidate for candidate in others if candidate in timings and timings[candidate].exact]
    best = min(exact, key=lambda candidate: timings[candidate].seconds, default=default)
    return best if timings[best].seconds < _MAX_RELATIVE_TIME * timings[default].seconds else default


def measured(num_threads: int) -> dict[CpuConfig, Timed]:
    """Return the cached timings; empty if there are none or they are invalid."""
    return _disk_cache(num_threads).read(_timings) or {}


def _timings(value: Any) -> dict[CpuConfig, Timed]:  # Any: JSON
    """Return saved timings. Raises ValueError."""
    if not isinstance(value, Mapping) or not all(map(_is_valid, value.values())):
        raise ValueError("these are no timings")
    return {candidate: Timed(*value[candidate.name]) for candidate in CPU_CONFIGS if candidate.name in value}


def time_configs(num_threads: int) -> None:
    """Time all configurations and cache the result, unless that was done. Restores the number of threads."""
    if measured(num_threads):
        return
    machine = DeviceCapabilities(torch.device("cpu"), torch.float32, page_size=16, num_ranks=1)
    seconds = {
        candidate: time_config(candidate, num_threads)
        for candidate in CPU_CONFIGS
        if candidate.runs([_TRIAL_SPEC], machine)
    }
    slowest = max(seconds.values(), default=0.0)
    # The slowest is never chosen. Whether a configuration is exact takes longer to find out than all the rest
    # here, so that is skipped.
    timings = {
        candidate.name: Timed(
            taken, taken < _MAX_RELATIVE_TIME * slowest and is_exact(candidate, num_threads)
        )
        for candidate, taken in seconds.items()
    }
    times = ", ".join(f"{name} {1e3 * timed.seconds:.2f} ms" for name, timed in timings.items())
    logger.info(
        "measured once for this machine: a block of a model on %d threads takes %s", num_threads, times
    )
    if not measured(num_threads):  # otherwise another process was first, and its result is used
        _disk_cache(num_threads).write(timings)


def is_exact(candidate: CpuConfig, num_threads: int) -> bool:
    if candidate.backend == "compiled":  # by construction; a loaded rank checks it in any case
        return True
    with _open_backend(candidate, num_threads) as backend:
        return rows_are_invariant(backend, candidate.dtype, "cpu")


def time_config(candidate: CpuConfig, num_threads: int) -> float:
    """Return the seconds of a block: the geometric mean over `_CASES` of the fastest run."""
    with torch.inference_mode(), _open_backend(candidate, num_threads) as backend:
        block = TrialBlock(backend, candidate.dtype, "cpu", hidden=_HIDDEN, inner=_INNER)
        inputs = [block.random(rows, _HIDDEN) for _, rows in _CASES]
        minimum = [math.inf] * len(_CASES)
        end_s = math.inf
        for round_ in range(1 + _ROUNDS):
            if time.perf_counter() > end_s:
                break
            for i, ((known, rows), x_NH) in enumerate(zip(_CASES, inputs, strict=True)):
                begin_s = time.perf_counter()
                block.run(x_NH, [known], [rows])
                if round_:  # the first round compiles
                    minimum[i] = min(minimum[i], time.perf_counter() - begin_s)
            end_s = min(end_s, time.perf_counter() + _MAX_S)
    return math.prod(minimum) ** (1 / len(minimum))


@contextmanager
def _open_backend(candidate: CpuConfig, num_threads: int) -> Iterator[Backend]:
    try:
        yield take_cpu(candidate.backend)
    finally:
        torch.set_num_threads(num_threads)


def _disk_cache(num_threads: int) -> DiskCache:
    subject = {
        "cpu": cpu_name(),
        "instructions": instructions_of_passes(),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "threads": num_threads,
        "code": _code(),
        "torch": torch.__version__,
    }
    return DiskCache("cpu-ways", subject)


@cache
def _code() -> str:
    """Return a digest of the code that computes: timings of other code are not used."""
    folder = Path(__file__).parents[3] / "drafter" / "compute"
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()


def _is_valid(value: object) -> bool:
    match value:
        case [float(seconds), bool()]:
            return 0.0 < seconds < math.inf
        case _:
            return False
