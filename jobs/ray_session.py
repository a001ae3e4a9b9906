"""A Ray to run on: the one that this process has, the one that RAY_ADDRESS names, or a local one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 200 * 1024 * 1024  # of a Ray started here: little goes through it


def ray_address() -> str | None:
    """The cluster that this process is told to use; `ray job submit` sets it."""
    return os.environ.get("RAY_ADDRESS")


def join_or_start_ray(*, num_cpus: int | None = None, **settings: Any) -> bool:  # Any: `ray.init`'s own
    """Connect, or start a Ray. Returns whether it was started here.

    Args:
        num_cpus: that a Ray started here may give out; None counts the machine's.
        settings: for `ray.init`, in either case.
    """
    import ray

    if ray.is_initialized():
        return False
    address = ray_address()
    if address:
        _use_token_if_there_is_one()
        ray.init(address=address, **settings)
        return False
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **settings,
    )
    return True


def lost_ray() -> str | None:
    """What has ended of a Ray that was started here and cannot live without it; None while all is well."""
    from ray._private import ray_constants, worker

    vital = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
    node = worker.global_worker.node  # there is no public way
    processes: Any = [] if node is None else node.dead_processes()
    dead = [kind for kind, _ in processes]
    return next((kind for kind in dead if kind in vital), None)


def _use_token_if_there_is_one() -> None:
    """With an explicit address Ray does not look for its token file by itself."""
    if (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
