"""Starts a drafter's process: one for a single engine, or one that all engines of the node share.

An engine's own drafter is placed in the engine's placement group and dies with the engine's process. A shared
drafter is a detached actor with a name derived from everything that its weights depend on. The first engine
starts it on its own node, outside all placement groups, and it exits once no engine has used it for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import signal
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ....cluster.config import EngineConfig
from ....cluster.errors import MantaError, PlacementError
from ....cluster.fleet.placement import Topology
from ...system.log_setup import in_force
from ..base.ray_actors import PLACEMENT_TIMEOUT_S, Actor, WorkerPlacement, start_actor
from ..base.ray_resources import this_node
from ..base.worker_base import forwarded_environment
from .drafter_worker import DrafterFacts, DrafterSetup, DrafterWorker

logger = logging.getLogger(__name__)

NAMESPACE = "manta"
LINGER_S = 10.0  # a shared drafter without an engine exits after this time
LOAD_TIMEOUT_S = 3600.0  # allows for downloads and large checkpoints
_THREADS = 64  # threads for the actor's calls: each engine has one that watches, and sometimes one more


class DrafterGoneError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class DrafterProcess:
    """A loaded drafter process; `ended` becomes ready when it has ended."""

    actor: Actor
    facts: DrafterFacts
    ended: ray.ObjectRef

    def has_ended(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return whether it has ended."""
        return bool(ray.wait([self.ended], timeout=timeout_s)[0])

    def answers(self, timeout_s: float) -> bool:
        with contextlib.suppress(RayError, GetTimeoutError):
            return ray.get(self.actor.pid.remote(), timeout=timeout_s) == self.facts.pid
        return False

    def kill(self) -> None:
        """Kill the process immediately, even if it is stopped."""
        with contextlib.suppress(Exception):  # Ray itself may be gone
            ray.kill(self.actor)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.facts.pid, signal.SIGKILL)


class DrafterSource:
    def __init__(self, topology: Topology, placement: WorkerPlacement) -> None:
        self._topology, self._placement = topology, placement

    @property
    def is_shared(self) -> bool:
        return self._topology.shared_drafter

    def start(self, config: EngineConfig) -> DrafterProcess:
        """Start a drafter and wait until it has loaded.

        Raises PlacementError if there is no room, CheckpointError or ConfigError from loading, and
        DrafterGoneError if it died.
        """
        actor = self._shared_actor(config) if self.is_shared else self._own_actor()
        setting = DrafterSetup(
            config=config,
            topology=self._topology,
            log=in_force(),
            environment=forwarded_environment(),
            linger_s=LINGER_S if self.is_shared else math.inf,
        )
        try:
            self._wait_until_placed(actor)
            facts: DrafterFacts = ray.get(actor.start.remote(setting), timeout=LOAD_TIMEOUT_S)
            return DrafterProcess(actor, facts, actor.watch.remote())
        except RayTaskError as error:
            with contextlib.suppress(RayError):
                ray.kill(actor)
            if isinstance(error.cause, MantaError):
                raise error.cause from None
            raise
        except (RayError, GetTimeoutError) as error:
            raise DrafterGoneError(str(error)) from None

    def _own_actor(self) -> Actor:
        rank = self._topology.drafter_rank
        assert rank is not None, "a split drafter has a bundle of its own"
        return self._start_actor(scheduling_strategy=self._placement.strategy(rank))

    def _shared_actor(self, config: EngineConfig) -> Actor:
        name = shared_name(config)
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, namespace=NAMESPACE)
        self._topology.check_drafter(this_node())
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        named = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
        return self._start_actor(scheduling_strategy=here, **named)

    def _start_actor(self, **options: Any) -> Actor:  # Any: Ray's options
        return start_actor(DrafterWorker, self._topology, max_concurrency=_THREADS, **options)

    def _wait_until_placed(self, actor: Actor) -> None:
        try:
            ray.get(actor.pid.remote(), timeout=PLACEMENT_TIMEOUT_S)
        except GetTimeoutError:
            with contextlib.suppress(RayError):
                ray.kill(actor)
            raise PlacementError(
                f"The drafter's process did not start within {PLACEMENT_TIMEOUT_S:g} s: its resources are "
                "in use. Stop other processes there, or colocate the drafter.",
                param="speculative_config.placement",
            ) from None


def shared_name(config: EngineConfig) -> str:
    """Return the name of the drafter that engines with these settings share on this node."""
    spec = config.speculative_config
    assert spec is not None, "only speculation uses a drafter"
    shared_settings = (
        *(config.model, spec.model, config.dtype, config.device, config.max_model_len),
        *(config.attention_backend, config.kv_cache_dtype, config.batch_invariant, config.load_format),
        *(config.hf_overrides, spec.hf_overrides, spec.input_embedding_scale, spec.quantization),
        spec.draft_window,
    )
    key = hashlib.sha256(repr(shared_settings).encode()).hexdigest()[:16]
    return f"manta-drafter-{ray.get_runtime_context().get_node_id()[:12]}-{key}"
