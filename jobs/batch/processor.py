"""`manta.data.build_processor`: a Ray dataset whose rows are answered, in the manner of `ray.data.llm`.

    dataset -> preprocess (tasks) -> engine actors (`processor_engine.py`) -> postprocess (tasks) -> dataset

Lazy, as all of Ray Data: nothing runs before the dataset is read or written. A row's columns go through to
`postprocess`, with those of its answer beside them. Ray Data keeps the books here: no ledger, no resume; that
is `manta batch`. Users import it as `manta.data`.
"""

from __future__ import annotations

import functools
import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.data

from ...actors.batch.rows import Layout
from ...actors.checkpoints import with_absolute_paths
from ...actors.workers.local_ray import start_ray
from ...actors.workers.room import may_grow, nodes
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError, PlacementError
from ...cluster.placement import NodeRoom
from ...cluster.room import beside_tasks, check_room, full_claim, leaving_a_cpu, smaller_claim
from ...cluster.vllm_settings import accept
from ..settings import parse_speculation
from .engine_groups import EngineGroups
from .processor_engine import ERROR_COLUMN, ProcessorEngine, check_sampling

# A batch is tried anew where its engine died under it. A row that kills every engine must end at last.
MAX_RETRIES = 3
LEAVE_TIMEOUT_S = 2.0
LOOK_EVERY_S = 0.05
BOOKED = ("CPU", "GPU")

Row = dict[str, Any]  # Any: whatever the user's dataset holds
RowFunction = Callable[[Row], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MantaEngineProcessorConfig:
    """Which engine answers the rows, and how many of it.

    Attributes:
        model_source: folder or hub id of the target.
        engine_kwargs: any other field of `EngineConfig`, under vLLM's names where those are known here.
        concurrency: engines; (1, 4) lets Ray Data choose between 1 and 4 as rows wait.
        batch_size: rows of one call; half of `max_num_seqs` if absent. Smaller ones are returned sooner, and
            fewer are answered anew when an engine dies.
        sampling_params: for rows that bring none in a column of that name; theirs win, field by field.
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
        least, most = self.pool
        if not 1 <= least <= most:
            raise ConfigError(
                f"concurrency={self.concurrency!r} must be a number of engines, or (least, most) of them, "
                "from 1.",
                param="concurrency",
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} must be at least 1.", param="batch_size")
        check_sampling(self.sampling_params)
        self.engine_config()

    @property
    def pool(self) -> tuple[int, int]:
        """The least and the most engines."""
        if isinstance(self.concurrency, tuple | list):
            least, most = self.concurrency
            return least, most
        return self.concurrency, self.concurrency

    def engine_config(self) -> EngineConfig:
        """The engine's settings. Raises ConfigError; an unknown name is answered with the nearest known."""
        settings = accept(self.engine_kwargs)
        if "model" in settings:
            raise ConfigError(
                f"engine_kwargs.model={settings['model']!r}: the target is named by model_source.",
                param="engine_kwargs.model",
            )
        settings["speculative_config"] = parse_speculation(settings.get("speculative_config"))
        # Admission limits are for users who can come again; rows wait.
        return EngineConfig.from_dict({**settings, "model": self.model_source, "max_num_queued_reqs": None})


def build_processor(
    config: MantaEngineProcessorConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """A function from dataset to dataset.

    Args:
        preprocess: gives a row the columns that the engine reads: `messages`, or `prompt` (text or token
            ids), and perhaps `sampling_params` and `chat_template_kwargs`. The row's others stay.
        postprocess: makes of a row and its answer what the dataset is to hold.
        preprocess_map_kwargs, postprocess_map_kwargs: for `Dataset.map`, e.g. num_cpus.

    Columns of an answer: generated_text, generated_tokens, num_input_tokens, num_generated_tokens,
    finish_reason, stop_reason, seed, mean_acceptance_length (null where nothing was drafted),
    num_draft_tokens, num_accepted_tokens, time_taken_llm (seconds), logprobs (of each generated token, as in
    `manta batch`; null where sampling_params asked for none), __inference_error__ ("" if all is well).
    """
    return Processor(
        config, preprocess, postprocess, preprocess_map_kwargs or {}, postprocess_map_kwargs or {}
    )


class Processor:
    """What `build_processor` makes: call it with a dataset, any number of times."""

    def __init__(
        self,
        config: MantaEngineProcessorConfig,
        preprocess: RowFunction | None,
        postprocess: RowFunction | None,
        preprocess_map_kwargs: Mapping[str, Any],
        postprocess_map_kwargs: Mapping[str, Any],
    ) -> None:
        self.config = config
        self._preprocess, self._preprocess_kwargs = preprocess, preprocess_map_kwargs
        self._postprocess, self._postprocess_kwargs = postprocess, postprocess_map_kwargs

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """The dataset with its rows answered, which starts when it is consumed.

        Raises:
            PlacementError: the cluster could not hold the engines, even if it were empty.
        """
        if self._preprocess is not None:
            before = functools.partial(_before, self._preprocess)
            dataset = dataset.map(before, **self._preprocess_kwargs)
        dataset = self._answered(dataset)
        if self._postprocess is not None:
            after = functools.partial(_after, self._postprocess, self.config.should_continue_on_error)
            dataset = dataset.map(after, **self._postprocess_kwargs)
        return dataset

    def _answered(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        settings, (least, most) = self.config, self.config.pool
        config = with_absolute_paths(settings.engine_config())
        room = find_room(config, least, most)
        config = replace(config, num_threads=room.num_threads)
        # Four calls of a block run at once (Ray Data's own number), and blocks beside each other: enough rows
        # in flight to fill the engine while others are on their way.
        batch_size = settings.batch_size or max(1, config.max_num_seqs // 2)
        calls = max(2, math.ceil(1.25 * config.max_num_seqs / batch_size))
        layout = Layout(defaults=dict(settings.sampling_params), seed=config.seed or 0)
        with warnings.catch_warnings():
            # Deprecated, and without a successor in this Ray: nothing else gives each actor its own place.
            warnings.simplefilter("ignore", DeprecationWarning)
            return dataset.map_batches(
                ProcessorEngine,
                fn_constructor_args=(config, layout, settings.should_continue_on_error),
                batch_size=batch_size,
                batch_format="pyarrow",
                zero_copy_batch=True,
                compute=ray.data.ActorPoolStrategy(
                    min_size=least,
                    max_size=room.most,
                    max_concurrent_calls_per_actor=calls,
                ),
                num_cpus=room.booked.get("CPU", 0.0),
                num_gpus=room.booked.get("GPU"),
                ray_remote_args_fn=room.places,
                max_task_retries=MAX_RETRIES,
            )


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """What an engine computes with, what of it stands in Ray's books, how many there may be, and where."""

    num_threads: int | None
    booked: Mapping[str, float]
    most: int
    places: Callable[[], dict[str, Any]]  # Any: Ray's options for actors


def find_room(config: EngineConfig, least: int, most: int) -> EngineRoom:
    """Room for the engines that leaves Ray Data CPUs for its own tasks, to read, preprocess and write.

    A dataset whose engines held all CPUs would wait for ever.
    """
    if not ray.is_initialized():
        start_ray()
    found = _nodes_in_peace()
    everything, free = [node.resources for node in found], [node.free for node in found]
    # Workers book what they compute on; an engine that is one process may book less.
    usable = leaving_a_cpu(everything) if config.needs_ray else everything
    fitting = full_claim(config, most, everything).num_fitting(usable)
    if fitting < most and not may_grow():
        _check(config, least, usable)
        most = max(least, fitting)
    full = full_claim(config, most, everything)
    claim = smaller_claim(config, most, free, full) or full
    # One process is placed by what it books, workers in a group.
    places = EngineGroups(claim.bundles, most) if config.needs_ray else _spread
    return EngineRoom(claim.num_threads, beside_tasks(claim, free), most, places)


def _nodes_in_peace() -> list[NodeRoom]:
    """The nodes, once engines of datasets that failed have left them: Ray Data leaves those in garbage."""
    gc.collect()
    deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
    while True:
        found = nodes()
        taken = any(
            node.free.get(name, 0.0) < node.resources.get(name, 0.0) for node in found for name in BOOKED
        )
        if not taken or time.monotonic() > deadline_s:
            return found
        time.sleep(LOOK_EVERY_S)


def _check(config: EngineConfig, engines: int, usable: Sequence[Mapping[str, float]]) -> None:
    try:
        check_room(config, engines, usable)
    except PlacementError as error:
        why = " Here a CPU of every node is left to Ray Data's own tasks." if config.needs_ray else ""
        raise PlacementError(error.message + why, param=error.param) from None


def _spread() -> dict[str, Any]:  # Any: Ray's options for actors
    """On different nodes, where there are some: an engine computes on more than it may book."""
    return {"scheduling_strategy": "SPREAD"}


def _before(preprocess: RowFunction, row: Row) -> Row:
    return {**row, **preprocess(row)}


def _after(postprocess: RowFunction, continuing: bool, row: Row) -> Row:
    if row[ERROR_COLUMN]:
        return row
    made = dict(postprocess(row))
    return {**made, ERROR_COLUMN: ""} if continuing else made
