"""`manta.data.build_processor`: answers the rows of a Ray dataset, with the interface of `ray.data.llm`.

    dataset -> preprocess (tasks) -> engine actors (`engine_stage.py`) -> postprocess (tasks) -> dataset

Lazy, like all of Ray Data: nothing runs before the dataset is read or written. `postprocess` gets a row's
columns and those of its answer. There is no ledger and no resume; `manta batch` has them. Users import this
as `manta.data`.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...actors.batch.dataset.row_requests import RowSchema
from ...actors.checkpoints.checkpoint_paths import with_absolute_paths
from ...actors.workers.base.ray_resources import may_grow, nodes
from ...actors.workers.local_ray import start_ray
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError, PlacementError
from ...cluster.fleet.placement import NodeResources
from ...cluster.fleet.resources import (
    check_engines_fit,
    full_request,
    reduced_request,
    reserve_cpu_per_node,
    with_task_cpus,
)
from ...cluster.vllm_settings import accept
from ..common.config_loading import parse_speculation
from ..common.options import check_least
from .engine_stage import ERROR_COLUMN, ProcessorEngine, check_sampling

logger = logging.getLogger(__name__)

MAX_RETRIES = 3  # of a batch whose engine died; bounded, because a row may kill every engine
DRAIN_TIMEOUT_S = 2.0
POLL_S = 0.05
GROUPS_INTERVAL_S = 0.5
UNUSED_TIMEOUT_S = 5.0  # of a group for an engine that Ray Data asked for and did not start
BOOKED = ("CPU", "GPU")

Row = dict[str, Any]  # Any: whatever the user's dataset holds
RowFunction = Callable[[Row], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MantaEngineProcessorConfig:
    """Which engine answers the rows, and how many engines.

    Attributes:
        model_source: folder, GGUF file or hub id of the target.
        engine_kwargs: any other field of `EngineConfig`, under vLLM's names where those are known here.
        concurrency: engines; with (1, 4) Ray Data chooses between 1 and 4.
        batch_size: rows of one call; half of `max_num_seqs` if absent. Smaller batches are returned sooner,
            and fewer rows are answered again when an engine dies.
        sampling_params: defaults for fields that a row's column of that name does not have.
        should_continue_on_error: a row that cannot be answered has a sentence in `__inference_error__` and
            skips `postprocess`; if False it ends the dataset.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int | tuple[int, int] = 1
    batch_size: int | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    should_continue_on_error: bool = True

    def __post_init__(self) -> None:
        minimum, maximum = self.pool
        if not 1 <= minimum <= maximum:
            raise ConfigError(
                f"concurrency={self.concurrency!r} must be a number of engines, or (least, most) of them, "
                "from 1.",
                param="concurrency",
            )
        check_least(self, 1, "batch_size")
        check_sampling(self.sampling_params)
        self.engine_config()

    @property
    def pool(self) -> tuple[int, int]:
        if isinstance(self.concurrency, tuple | list):
            minimum, maximum = self.concurrency
            return minimum, maximum
        return self.concurrency, self.concurrency

    def engine_config(self) -> EngineConfig:
        """Return the engine's settings. Raises ConfigError, which names the nearest known setting."""
        settings = accept(self.engine_kwargs)
        if "model" in settings:
            raise ConfigError(
                f"engine_kwargs.model={settings['model']!r}: the target is named by model_source.",
                param="engine_kwargs.model",
            )
        settings["speculative_config"] = parse_speculation(settings.get("speculative_config"))
        # Admission limits are for online requests; rows wait.
        return EngineConfig.from_dict({**settings, "model": self.model_source, "max_num_queued_reqs": None})


def build_processor(
    config: MantaEngineProcessorConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Return a function from dataset to dataset.

    Args:
        preprocess: returns columns that the engine reads: `messages`, or `prompt` (text or token ids), and
            optionally `sampling_params`, `chat_template_kwargs`, and fields of chats (`tools`, `tool_choice`,
            `reasoning_effort` ...). The row's other columns stay.
        postprocess: returns the final columns, given a row with its answer.
        preprocess_map_kwargs, postprocess_map_kwargs: for `Dataset.map`, e.g. num_cpus.

    Columns of an answer: generated_text, generated_tokens, num_input_tokens, num_generated_tokens,
    finish_reason, stop_reason, seed, mean_acceptance_length (null where nothing was drafted),
    num_draft_tokens, num_accepted_tokens, time_taken_llm (seconds), logprobs (of each generated token, as in
    `manta batch`; null where sampling_params asked for none), __inference_error__ ("" if all is well).
    """
    return Processor(
        config, preprocess, postprocess, preprocess_map_kwargs or {}, postprocess_map_kwargs or {}
    )


@dataclass(frozen=True, slots=True)
class Processor:
    config: MantaEngineProcessorConfig
    preprocess: RowFunction | None
    postprocess: RowFunction | None
    preprocess_kwargs: Mapping[str, Any]
    postprocess_kwargs: Mapping[str, Any]

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        if self.preprocess is not None:
            before = functools.partial(_before, self.preprocess)
            dataset = dataset.map(before, **self.preprocess_kwargs)
        dataset = self._answered(dataset)
        if self.postprocess is not None:
            after = functools.partial(_after, self.postprocess, self.config.should_continue_on_error)
            dataset = dataset.map(after, **self.postprocess_kwargs)
        return dataset

    def _answered(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        settings, (minimum, maximum) = self.config, self.config.pool
        config = with_absolute_paths(settings.engine_config())
        placement = plan_engines(config, minimum, maximum)
        config = replace(config, num_threads=placement.num_threads)
        # Enough calls at once to fill the engine while other batches are on their way.
        batch_size = settings.batch_size or max(1, config.max_num_seqs // 2)
        calls = max(2, math.ceil(1.25 * config.max_num_seqs / batch_size))
        row_schema = RowSchema(defaults=dict(settings.sampling_params), seed=config.seed or 0)
        with warnings.catch_warnings():
            # ray_remote_args_fn is deprecated, but nothing else gives each actor its own placement group.
            warnings.simplefilter("ignore", DeprecationWarning)
            return dataset.map_batches(
                ProcessorEngine,
                fn_constructor_args=(config, row_schema, settings.should_continue_on_error),
                batch_size=batch_size,
                batch_format="pyarrow",
                zero_copy_batch=True,
                compute=ray.data.ActorPoolStrategy(
                    min_size=minimum,
                    max_size=placement.most,
                    max_concurrent_calls_per_actor=calls,
                ),
                num_cpus=placement.booked.get("CPU", 0.0),
                num_gpus=placement.booked.get("GPU"),
                ray_remote_args_fn=placement.places,
                max_task_retries=MAX_RETRIES,
            )


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Threads of an engine, the resources it books with Ray, the most engines, and their placement."""

    num_threads: int | None
    booked: Mapping[str, float]
    most: int
    places: Callable[[], dict[str, Any]]  # Any: Ray's options for actors


def plan_engines(config: EngineConfig, minimum: int, maximum: int) -> EnginePlacement:
    """Return room for the engines that leaves CPUs for Ray Data's own tasks, which would wait forever."""
    if not ray.is_initialized():
        start_ray()
    found = _settled_nodes()
    everything, free = [node.resources for node in found], [node.free for node in found]
    # Workers book what they compute on; an engine that is one process may book less.
    usable = reserve_cpu_per_node(everything) if config.needs_ray else everything
    fitting = full_request(config, maximum, everything).num_fitting(usable)
    if fitting < maximum and not may_grow():
        _check(config, minimum, usable)
        maximum = max(minimum, fitting)
    full = full_request(config, maximum, everything)
    resources = reduced_request(config, maximum, free, full) or full
    # An engine without workers is placed by the resources it books.
    places = EngineGroups(resources.bundles, maximum) if config.needs_ray else _spread
    return EnginePlacement(resources.num_threads, with_task_cpus(resources, free), maximum, places)


def _settled_nodes() -> list[NodeResources]:
    """Return the nodes after engines of failed datasets have left, which Ray Data leaves to the collector."""
    gc.collect()
    deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
    while True:
        found = nodes()
        taken = any(
            node.free.get(name, 0.0) < node.resources.get(name, 0.0) for node in found for name in BOOKED
        )
        if not taken or time.monotonic() > deadline_s:
            return found
        time.sleep(POLL_S)


def _check(config: EngineConfig, engines: int, usable: Sequence[Mapping[str, float]]) -> None:
    try:
        check_engines_fit(config, engines, usable)
    except PlacementError as error:
        why = " Here a CPU of every node is left to Ray Data's own tasks." if config.needs_ray else ""
        raise PlacementError(error.message + why, param=error.param) from None


def _spread() -> dict[str, Any]:  # Any: Ray's options for actors
    """Spread engines over nodes: an engine computes on more than it may book."""
    return {"scheduling_strategy": "SPREAD"}


class EngineGroups:
    """Placement groups for engines with workers. Ray Data calls it for each engine, as `ray_remote_args_fn`.

    Ray Data reports no end of an actor, and Ray removes a group only when the driver ends; until then it
    would block the next dataset. So a thread removes groups when their engine is gone.
    """

    def __init__(self, bundles: Sequence[Mapping[str, float]], maximum: int) -> None:
        self._bundles = [dict(bundle) for bundle in bundles]
        self._most = maximum
        self._lock = threading.Lock()
        self._groups: dict[str, PlacementGroup] = {}  # by the engine's name
        self._unseen: dict[str, float] = {}  # engines that Ray has not listed yet, by since when (monotonic)

    def __reduce__(self) -> tuple[object, ...]:
        return EngineGroups, (self._bundles, self._most)

    def __call__(self) -> dict[str, Any]:  # Any: Ray's options for actors
        living = set(list_named_actors())
        with self._lock:
            self._remove_gone(living)
            # Ray Data also calls without starting an actor; a started one is listed before the next call.
            name = next((name for name in self._unseen if name not in living), None)
            if name is None and len(self._groups) < self._most:
                name = self._make()
            if name is None:
                return {}
            strategy = PlacementGroupSchedulingStrategy(
                self._groups[name], placement_group_bundle_index=0, placement_group_capture_child_tasks=False
            )
        return {"scheduling_strategy": strategy, "name": name}

    def _make(self) -> str:
        name = f"manta-engine-{uuid.uuid4().hex}"
        if not self._groups:
            threading.Thread(target=self._watch, name="manta-groups", daemon=True).start()
        self._groups[name] = placement_group(self._bundles, strategy="STRICT_PACK", name=name)
        self._unseen[name] = time.monotonic()
        return name

    def _watch(self) -> None:
        """Remove groups without an engine, until there are none or Ray ends."""
        while True:
            time.sleep(GROUPS_INTERVAL_S)
            try:
                living = set(list_named_actors()) if ray.is_initialized() else set[str]()
                with self._lock:
                    if ray.is_initialized():
                        self._remove_gone(living)
                    else:
                        self._groups.clear()
                    if not self._groups:
                        return
            except RayError as error:  # a busy head node responds late
                logger.warning("the placement groups of engines cannot be checked: %s", error)

    def _remove_gone(self, living: set[str]) -> None:
        """Remove groups of engines that ended or never started. A restarting engine is listed."""
        for name in living & self._unseen.keys():
            del self._unseen[name]
        for name in self._groups.keys() - living:
            if time.monotonic() - self._unseen.get(name, -math.inf) > UNUSED_TIMEOUT_S:
                self._unseen.pop(name, None)
                remove_placement_group(self._groups.pop(name))


def _before(preprocess: RowFunction, row: Row) -> Row:
    return {**row, **preprocess(row)}


def _after(postprocess: RowFunction, continuing: bool, row: Row) -> Row:
    if row[ERROR_COLUMN]:
        return row
    made = dict(postprocess(row))
    return {**made, ERROR_COLUMN: ""} if continuing else made
