"""A Ray cluster for one test, or for the tests of a process."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from support.engines.devices import ON_GPU

# The fork servers of `manta serve`, with what batch jobs import. Ends with its standard input.
_FORK_SERVER = """
import contextlib, importlib, json, sys
from manta.actors.workers.base.fork_server import ForkServer, Stages
from manta.jobs.serve.preloaded_imports import HTTP, LIBRARIES, LOOPS, TARGET, ServeWithoutPandas

def load(names):
    for name in names:
        importlib.import_module(name)

def load_libraries():
    ServeWithoutPandas.install()
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

def load_engine():
    load(("pyarrow.parquet", "pyarrow.dataset", *(f"manta.{name}" for name in (*HTTP, *TARGET))))
    # Interpreted kernels draft slowly, so that all drafts would be late.
    importlib.import_module("manta.actors.workers.drafter.drafter_client").MAX_WAIT_S = 60.0

nothing = lambda: None
stages = Stages(
    first=load_libraries, errand=lambda: b"", of_errand=nothing, second=load_engine, third=lambda: load(LOOPS)
)
print(json.dumps(ForkServer(stages).worker_command()), flush=True)
sys.stdin.read()
"""


@contextmanager
def small_ray(
    num_cpus: int | None, *, _system_config: dict[str, Any] | None = None, **settings: Any
) -> Iterator[None]:  # Any: Ray's settings
    """A small cluster. Its CPUs are declared, not cores. Its workers begin with their imports done."""
    import ray
    from manta.actors.workers import local_ray

    folder = tempfile.mkdtemp(prefix="manta-ray-")  # short: Ray puts sockets below it
    common = {"include_dashboard": False, "object_store_memory": 100 * 2**20, "log_to_driver": False}
    config = {"prestart_worker_first_driver": False, **(_system_config or {})}  # it would be one for each CPU
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Workers export no metrics if the agent needs half a minute to start, as on a busy machine.
            patch.setattr(local_ray, "AGENT_NICENESS", 0)
            local_ray.start_ray(
                () if ON_GPU else worker_command(),
                address="local",
                num_cpus=num_cpus,
                _temp_dir=folder,
                _system_config=config,
                **common,
                **settings,
            )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@cache
def worker_command() -> tuple[str, ...]:
    """Start this process's fork servers; return what precedes the path of Ray's `setup_worker.py`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", _FORK_SERVER], **pipes)
    assert process.stdin is not None and process.stdout is not None
    atexit.register(process.communicate)
    return tuple(json.loads(process.stdout.readline()))
