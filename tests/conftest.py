"""Shared fixtures: tiny random checkpoints on disk and the shipped pair."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray's workers have niceness 15: next to other computing tests they would take three times as long.
os.environ.setdefault("RAY_worker_niceness", "0")
if "MANTA_CACHE_DIR" not in os.environ:  # what was measured here before is none of a test's business
    os.environ["MANTA_CACHE_DIR"] = _cache = mkdtemp(prefix="manta-cache-")
    atexit.register(rmtree, _cache, ignore_errors=True)

import pytest
import torch
from hypothesis import settings
from support.engines import devices
from support.engines.small_ray import small_ray
from support.paths import MODELS

# Several processes (pytest -n) take tests by file, or by their mark `xdist_group`, which the conftest.py of a
# folder may set. Those of "servers" and of "jobs" start Ray and wait as much as they compute; both take about
# as long, so that a third process computes meanwhile and no more than two clusters start at once. These
# groups take longest and begin first.
_FIRST = ("servers", "jobs", "lossless", "device runner")
_SHARED_RAY = pytest.StashKey[ExitStack]()

# A busy machine must not fail a property: no test asserts a time.
settings.register_profile("manta", deadline=None)
settings.load_profile("manta")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups first, so that no process is left with one at the end; sharers of Ray together."""
    items.sort(key=lambda item: not _shares_ray(item))
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    name = group.args[0] if group else ""
    return next((i for i, first in enumerate(_FIRST) if name.startswith(first)), len(_FIRST))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SHARED_RAY] = ExitStack()
    config.add_cleanup(config.stash[_SHARED_RAY].close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not _shares_ray(item):
        item.config.stash[_SHARED_RAY].close()  # a process has one cluster, and this test may start its own
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # Idle threads spin on the cores of other processes, so tests restore the number of threads.
        torch.set_num_threads(1)


def _shares_ray(item: pytest.Item) -> bool:
    return "ray_session" in getattr(item, "fixturenames", ())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a group go to one process, as do those of a file that have no group."""
    from xdist.scheduler.loadgroup import LoadGroupScheduling

    class Groups(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

    return Groups(config, log)


@pytest.fixture(scope="module")
def on_the_device() -> Iterator[None]:
    """New tensors are made on the device of kernel tests."""
    with torch.device(devices.DEVICE) if devices.ON_GPU else nullcontext():
        yield


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.checkpoints.tiny import make_tiny_target  # transformers, which kernels' tests do without

    return make_tiny_target(tmp_path_factory.mktemp("tiny-qwen3"), "qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.checkpoints.tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.checkpoints.tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("tiny-qwen3-moe"), "qwen3_moe")


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.checkpoints.tiny import make_tiny_drafter

    return make_tiny_drafter(tmp_path_factory.mktemp("tiny-drafter"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target with a tokenizer and its drafter."""
    from support.checkpoints.text_pair import make_text_pair

    return make_text_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def shipped_pair() -> tuple[Path, Path]:
    """Folders of the shipped target and drafter."""
    return MODELS / "target", MODELS / "drafter"


@pytest.fixture(scope="module")
def ray_session(pytestconfig: pytest.Config) -> None:
    """One small Ray cluster for consecutive modules that request it."""
    import ray

    if not ray.is_initialized():
        often = {"metrics_report_interval_ms": 500}
        pytestconfig.stash[_SHARED_RAY].enter_context(small_ray(8, num_gpus=0, _system_config=often))
