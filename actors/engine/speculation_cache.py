"""Stores what speculation has learned on disk, so that a restarted engine begins with it.

    step-costs   step times of this model, drafter and configuration on this machine
    acceptance   acceptance probability by margin, position and temperature of this model and drafter,
                 on any machine

Read when an engine is made; written when it is closed and every few minutes in between. Stored values are a
starting point that measurements replace. Those that say drafts do not pay may come from a busy machine or
from other text: they are ignored. Each start measures a few steps before the first request. If few drafts
were observed, the acceptance lengths on the drafter's model card complete them.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from statistics import mean

from ...cluster.config import EngineConfig, at_load
from ...cluster.disk_cache import DiskCache
from ...cluster.engine.engine_core import EngineCore
from ...cluster.step.executor import ExecutorInfo
from ...drafter.card import card_lengths
from ...version import __version__
from ..system.host_resources import cpu_name, owned_cores

logger = logging.getLogger(__name__)

_WRITE_INTERVAL_S = 300.0
_MEASURE_S = 1.0  # at most, of a start


class SpeculationCache:
    def __init__(self, config: EngineConfig, info: ExecutorInfo, engine: EngineCore) -> None:
        pair, self._engine = _pair(config, info), engine
        self._costs = engine.costs
        self._cost_cache = DiskCache("step-costs", _cost_factors(config, info) | pair)
        self._survival = engine.acceptance
        self._acceptance_cache = DiskCache("acceptance", pair | _written_s(config))
        spec = config.speculative_config
        self._card_lengths = [] if spec is None or spec.model is None else card_lengths(Path(spec.model))
        self.due_s = time.monotonic() + _WRITE_INTERVAL_S  # when to write next
        for learned, cache in ((self._costs, self._cost_cache), (self._survival, self._acceptance_cache)):
            if learned is not None:
                cache.read(learned.read)
        self._trusts_saved = engine.would_draft
        if not self._trusts_saved:
            logger.info("Saved statistics say that drafts do not pay; they are measured again.")
            engine.reset_speculation()
        self._set_prior()

    def measure_steps(self) -> None:
        """Measure steps before the first request: this machine may be busier than when costs were saved."""
        self._engine.measure_steps(_MEASURE_S)
        self._restore()

    def end_warm_up(self) -> None:
        """Forget the requests so far, except for the costs of their steps."""
        self._engine.end_warm_up()
        self._restore()

    def _restore(self) -> None:
        """Read the saved acceptance again, which a warm-up resets."""
        survival = self._survival
        if survival is not None and self._trusts_saved:
            self._acceptance_cache.read(survival.read)
        self._set_prior()

    def _set_prior(self) -> None:
        survival = self._survival
        self._drafter = None if survival is None else survival.num_drafters
        if survival is not None and self._card_lengths:
            survival.set_prior(mean(self._card_lengths))

    def write(self) -> None:
        """Write what was learned; no acceptance if the drafter was replaced since the start."""
        self.due_s = time.monotonic() + _WRITE_INTERVAL_S
        if self._costs is not None and self._costs.has_measured_drafts:
            self._cost_cache.write(self._costs.as_json())
        survival = self._survival
        if survival is not None and survival.has_observations and survival.num_drafters == self._drafter:
            self._acceptance_cache.write(survival.as_json())


def _pair(config: EngineConfig, info: ExecutorInfo) -> dict[str, str | int | None]:
    spec = config.speculative_config
    return {
        "manta": __version__,
        "model": config.model,
        "drafter": None if spec is None else spec.drafter,
        "method": None if spec is None else spec.method + (" + suffix" if spec.suffix_drafts else ""),
        "drafts": info.num_speculative_tokens,
        "dtype": info.dtype,
        "quantization": at_load(config.quantization),
        "kv_cache_dtype": config.kv_cache_dtype,
    }


def _cost_factors(config: EngineConfig, info: ExecutorInfo) -> dict[str, str | int | None]:
    """Return what determines step times besides the pair of models, for their cache key."""
    spec = config.speculative_config
    return {
        "placement": None if spec is None else spec.placement,
        "backend": config.attention_backend,
        "ranks": config.tensor_parallel_size,
        "device": info.device if info.device == "cpu" else _gpu_names(),
        "cpu": cpu_name(),
        "threads": config.num_threads or owned_cores(),
        "instructions": os.environ.get("MANTA_CPU_INSTRUCTIONS"),
    }


def _written_s(config: EngineConfig) -> dict[str, float | None]:
    """Return the modification time of a local drafter's weights, which training changes."""
    spec = config.speculative_config
    path = Path("" if spec is None else spec.model or "")
    if path.is_file():
        return {"written_s": path.stat().st_mtime}
    files = path.glob("*.safetensors") if spec is not None and spec.model is not None else ()
    return {"written_s": max((file.stat().st_mtime for file in files), default=None)}


def _gpu_names() -> str:
    """Return the driver's GPU names; this process may not use the GPU."""
    names: set[str] = set()
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        lines = file.read_text(encoding="utf-8").splitlines()
        names |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(names)) or "cuda"
