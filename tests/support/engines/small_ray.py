"""A Ray cluster for one test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def small_ray(num_cpus: int | None, **settings: Any) -> Iterator[Any]:  # Any: Ray's settings and context
    """A small cluster; yields the result of `ray.init`. Its CPUs are declared, not cores."""
    import ray

    folder = tempfile.mkdtemp(prefix="manta-ray-")  # short: Ray puts sockets below it
    common = {"include_dashboard": False, "object_store_memory": 100 * 2**20, "log_to_driver": False}
    try:
        yield ray.init(num_cpus=num_cpus, _temp_dir=folder, **common, **settings)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
