"""What speculation has learned is kept between starts, so that an engine begins where the last one stood.

    step-costs   what steps take: of this model, drafter and whatever else decides what runs, on this machine
    acceptance   how likely drafts are to stand, by margin, position and temperature: of this model and
                 drafter, on whatever machine

Read when an engine is made, written when it is closed and every few minutes in between. What is kept is
where an engine begins, no more: what it measures itself takes its place. What says that drafts do not pay was
measured while the machine was busy, or of other text, as likely as it is true; so it is not believed, and the
engine tries drafts in its first steps as one that knows nothing. What few drafts have told is completed by
the acceptance lengths on the drafter's card. `cluster/disk_cache.py` says where it lies and what becomes of a
broken file. Called by `actors/llm.py` and `async_engine.py`.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from statistics import mean

from ...cluster.config import EngineConfig
from ...cluster.disk_cache import DiskCache
from ...cluster.engine.engine_core import EngineCore
from ...cluster.speculation.acceptance_model import AcceptanceModel
from ...cluster.speculation.step_cost_model import StepCostModel
from ...cluster.step.executor import ExecutorInfo
from ...drafter.card import card_lengths
from ...version import __version__
from ..system.host_resources import cpu_name, owned_cores

logger = logging.getLogger(__name__)

_EVERY_S = 300.0


class SpeculationCache:
    """Of one engine; nothing is kept where nothing is decided by it.

    Args:
        engine: freshly made.
    """

    def __init__(self, config: EngineConfig, info: ExecutorInfo, engine: EngineCore) -> None:
        pair, self._engine = _pair(config, info), engine
        self._costs, self._kept_costs = engine.costs, DiskCache("step-costs", _runs(config, info) | pair)
        self._survival = engine.acceptance
        self._kept_survival = DiskCache("acceptance", pair | _written_s(config))
        spec = config.speculative_config
        self._card_lengths = [] if spec is None or spec.model is None else card_lengths(Path(spec.model))
        self._due_s = time.monotonic() + _EVERY_S
        for learned, kept in ((self._costs, self._kept_costs), (self._survival, self._kept_survival)):
            if learned is not None:
                _read(learned, kept)
        self._begin()

    def end_warm_up(self) -> None:
        """Have the engine forget the requests so far, and begin with the drafts that were kept."""
        self._engine.end_warm_up()
        if self._survival is not None:
            _read(self._survival, self._kept_survival)
        self._begin()

    def _begin(self) -> None:
        if not self._engine.speculation_pays:
            logger.info("What was kept says that drafts do not pay; it is measured anew.")
            self._engine.forget_speculation()
        survival = self._survival
        self._drafter = None if survival is None else survival.num_drafters
        if survival is not None and self._card_lengths:
            survival.expect(mean(self._card_lengths))

    def keep_if_due(self) -> None:
        """Between two steps."""
        if time.monotonic() >= self._due_s:
            self.keep()

    def keep(self) -> None:
        """Now, if anything was learned; of a drafter that took the first one's place nothing."""
        self._due_s = time.monotonic() + _EVERY_S
        if self._costs is not None and self._costs.has_measured_drafts:
            self._kept_costs.write(self._costs.as_json())
        survival = self._survival
        if survival is not None and survival.has_observations and survival.num_drafters == self._drafter:
            self._kept_survival.write(survival.as_json())


def _read(learned: StepCostModel | AcceptanceModel, kept: DiskCache) -> None:
    if (value := kept.read()) is None:
        return
    try:
        learned.read(value)
    except ValueError as error:
        logger.warning("%s is measured anew: %s", kept.path, error)


def _pair(config: EngineConfig, info: ExecutorInfo) -> dict[str, str | int | None]:
    """Whose drafts, judged by whom."""
    spec = config.speculative_config
    return {
        "manta": __version__,
        "model": config.model,
        "drafter": None if spec is None else spec.drafter,
        "method": None if spec is None else spec.method,
        "drafts": info.num_speculative_tokens,
        "dtype": info.dtype,
        "quantization": config.quantization,
    }


def _runs(config: EngineConfig, info: ExecutorInfo) -> dict[str, str | int | None]:
    """What else decides what a step takes, as far as it can be told."""
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
    """When the drafter's weights were written, if they lie in a folder: who trains writes others there."""
    spec = config.speculative_config
    folder = Path("" if spec is None else spec.model or "")
    files = folder.glob("*.safetensors") if spec is not None and spec.model is not None else ()
    return {"written_s": max((file.stat().st_mtime for file in files), default=None)}


def _gpu_names() -> str:
    """As the driver tells them: this process may be none that uses a GPU."""
    names: set[str] = set()
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        lines = file.read_text(encoding="utf-8").splitlines()
        names |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(names)) or "cuda"
