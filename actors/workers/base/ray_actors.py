"""Starts the actors of workers and drafters, and waits for the results of their calls.

Called by `ray_executor.py` and `drafter_process.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ....cluster.errors import EngineDeadError, MantaError, PlacementError
from ....cluster.fleet.placement import Topology

Actor = Any  # ray.actor.ActorHandle of a dynamically wrapped class has no static methods


def start_actor(kind: type, topology: Topology, **options: Any) -> Actor:  # Any: Ray's options
    """Start an actor with a worker's resources, which Ray does not restart."""
    if topology.device == "cuda":
        # Hidden devices prevent peer access between processes (a 2400 times slower all-reduce, or a hang).
        options["runtime_env"] = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    resources = topology.worker_resources
    options |= {"num_cpus": resources.get("CPU", 0.0), "num_gpus": resources.get("GPU", 0.0)}
    return ray.remote(kind).options(max_restarts=0, **options).remote()


def gather(calls: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any]:  # Any: what workers return.
    """Return all results by rank. The first failure is raised at once, without waiting for others."""
    deadline_s = time.monotonic() + timeout_s
    waiting = list(calls)
    while waiting:
        ended, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ended:
            ranks = sorted(calls.index(call) for call in waiting)
            raise PlacementError(
                f"The workers of ranks {ranks} did not start within {timeout_s:g} s. See their logs; "
                "other actors may use their bundles."
            )
        for call in ended:
            _result(call, calls.index(call))
    return ray.get(list(calls))


def _result(call: ray.ObjectRef, rank: int) -> Any:  # Any: what workers return.
    """Raise a worker's own errors unwrapped."""
    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, MantaError):
            raise error.cause from None
        raise
    except RayError as error:
        raise EngineDeadError(f"The worker of rank {rank} died while starting: {error}") from None


def cause(call: ray.ObjectRef) -> str:
    """Return why a call ended, for a log line."""
    try:
        return str(ray.get(call, timeout=1.0))
    except RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayError as error:
        return type(error).__name__
