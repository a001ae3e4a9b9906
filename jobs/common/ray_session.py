"""Connects to Ray: the one of this process, the one at RAY_ADDRESS, or a new local one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

OBJECT_STORE_BYTES = 200 * 1024 * 1024  # for a Ray that is started here; little data passes through it


def ray_address() -> str | None:
    return os.environ.get("RAY_ADDRESS")


def join_or_start_ray(
    *,
    num_cpus: int | None = None,
    worker_command: Sequence[str] = (),
    **settings: Any,  # Any: `ray.init`'s own
) -> bool:
    """Connect to Ray, or start one (`num_cpus`, `worker_command`); return whether it was started."""
    import ray

    from ...actors.workers.local_ray import start_ray

    if ray.is_initialized():
        return False
    address = ray_address()
    if address:
        join_ray(address, **settings)
        return False
    start_ray(
        worker_command,
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **settings,
    )
    return True


def join_ray(address: str, **settings: Any) -> None:  # Any: arguments of `ray.init`
    """Connect to the Ray at an address. Raises ConfigError if none answers, or if it refuses the token."""
    import ray

    from ...actors.workers.local_ray import check_address, on_loopback, use_token

    use_token()
    check_address(address)
    host = address.rpartition(":")[0]
    with on_loopback() if host in ("", "127.0.0.1", "localhost") else nullcontext():
        ray.init(address=address, **settings)


def dead_ray_process() -> str | None:
    """Return the vital process (raylet or GCS) of a Ray started here that has exited; None if all run."""
    from ray._private import ray_constants, worker

    vital = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
    node = worker.global_worker.node  # there is no public API
    processes: Any = [] if node is None else node.dead_processes()
    dead = [kind for kind, _ in processes]
    return next((kind for kind in dead if kind in vital), None)
