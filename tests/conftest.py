"""Shared fixtures: tiny random checkpoints on disk and the shipped pair."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import wraps
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray's workers have niceness 15: next to other computing tests they would take three times as long.
os.environ.setdefault("RAY_worker_niceness", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of OpenMP that wait for work must not spin on the cores of other test processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "MANTA_CACHE_DIR" not in os.environ:  # what was measured here before is none of a test's business
    os.environ["MANTA_CACHE_DIR"] = _cache = mkdtemp(prefix="manta-cache-")
    atexit.register(rmtree, _cache, ignore_errors=True)

import pytest
import torch
from hypothesis import settings
from support.engines import devices
from support.kernels.sanitized_tests import sanitized
from support.paths import MODELS
from support.short_form import WHOLE, chosen_tests

# Several processes (pytest -n) take tests by file, or by these groups of files. Those of "servers" and of
# "jobs" start Ray and wait as much as they compute: each group has one process, so that a third process
# computes meanwhile and no more than two clusters start at once. (The mark `xdist_group` has no effect with
# pytest 9.2 and pytest-xdist 3.8.) The groups, and then the files that take longest, begin first.
_GROUPS = {
    "servers": (
        "tests/end_to_end/serve/",
        "tests/end_to_end/lossless/test_lossless_topologies",
        "tests/actors/workers/test_ray_executor",
    ),
    "jobs": ("tests/end_to_end/batch/",),
}
_LONGEST = (
    "tests/end_to_end/gpu_start/test_gpu_rehearsal.py",
    "tests/end_to_end/lossless/test_lossless.py",
    "tests/actors/targets/test_device_runner.py",
    "tests/drafter/gpu_triton/test_kernels_compile.py",
    "tests/drafter/cpu/test_cpu_compiled.py",
    "tests/end_to_end/lossless/test_lossless_trees.py",
    "tests/end_to_end/lossless/test_device_trees.py",
    "tests/jobs/drafters/test_drafter_explain.py",
    "tests/jobs/drafters/test_drafter_train.py",
)
_SHARED_RAY = pytest.StashKey[ExitStack]()

# A busy machine must not fail a property: no test asserts a time.
settings.register_profile("manta", deadline=None, max_examples=100 if WHOLE else 50)
settings.load_profile("manta")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest groups first, so that no process is left with one at the end; sharers of Ray together."""
    if not WHOLE and not any("[" in str(argument) for argument in config.args):
        chosen = chosen_tests(items)
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen
    items.sort(key=lambda item: not _shares_ray(item))
    if os.environ.get("PYTEST_XDIST_WORKER"):
        first = (*_GROUPS, *_LONGEST)
        places = {scope: place for place, scope in enumerate(first)}
        items.sort(key=lambda item: places.get(_scope(item.nodeid), len(first)))


def _scope(node_id: str) -> str:
    """Return the group of a test's file, or the file."""
    file = node_id.partition("::")[0]
    return next((group for group, paths in _GROUPS.items() if file.startswith(paths)), file)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose a seed of random examples, which the processes share, before hypothesis reads it.

    The short form tries the same examples everywhere, so that a change fails for what it changes; the whole
    form searches.
    """
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = secrets.randbits(32) if WHOLE else 0
    config.stash[_SHARED_RAY] = ExitStack()
    config.add_cleanup(config.stash[_SHARED_RAY].close)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed of random examples: {config.option.hypothesis_seed}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how to run each failed test alone, with the same random examples."""
    stats = terminalreporter.stats
    failed = dict.fromkeys(report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ()))
    if failed:
        terminalreporter.section("to run one of these alone")
    for node_id in failed:
        terminalreporter.write_line(f"make pytest SEED={config.option.hypothesis_seed} TESTS='{node_id}'")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not _shares_ray(item):
        item.config.stash[_SHARED_RAY].close()  # a process has one cluster, and this test may start its own
    _check_invariance_once()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # Idle threads spin on the cores of other processes, so tests restore the number of threads.
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with sanitized(item):
        return (yield)


def _check_invariance_once() -> None:
    """Remember which rows are batch-invariant: the check takes longer than a tiny engine's start."""
    for name in ("warmup", "backend_selection"):
        module: Any = sys.modules.get(f"manta.actors.targets.loading.{name}")
        check = getattr(module, "rows_are_invariant", None)
        if check is not None and not hasattr(check, "__wrapped__"):
            module.rows_are_invariant = _remembering(check)


_INVARIANT_ROWS: set[str] = set()


def _remembering(check: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(check)
    def rows_are_invariant(backend: object, *case: object, **more: object) -> bool:
        key = repr((type(backend), vars(backend), case, more, torch.get_num_threads()))
        if key in _INVARIANT_ROWS:
            return True
        if holds := check(backend, *case, **more):
            _INVARIANT_ROWS.add(key)
        return holds

    return rows_are_invariant


def _shares_ray(item: pytest.Item) -> bool:
    return "ray_session" in getattr(item, "fixturenames", ())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a group go to one process, as do those of a file that has no group."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return Groups(config, log)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread of PyTorch, where results are compared with a process's: more threads sum otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    from support.engines.small_ray import small_ray

    if not ray.is_initialized():
        often = {"metrics_report_interval_ms": 500}
        pytestconfig.stash[_SHARED_RAY].enter_context(small_ray(8, num_gpus=0, _system_config=often))
