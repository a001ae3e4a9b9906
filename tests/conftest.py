"""Shared fixtures: tiny random checkpoints on disk and the pair that ships."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when they are decorated

import pytest
from hypothesis import settings
from tiny import make_tiny_drafter, make_tiny_target

ROOT = Path(__file__).resolve().parent.parent

# A busy machine must not fail a property: no test asserts a time.
settings.register_profile("manta", deadline=None)
settings.load_profile("manta")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny-qwen3"), "qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("tiny-drafter"))


@pytest.fixture(scope="session")
def shipped_pair() -> tuple[Path, Path]:
    """Folders of the target and the drafter that ship."""
    return ROOT / "models" / "target", ROOT / "models" / "drafter"


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """One small Ray cluster for a module's tests; its CPUs are entries in a book, not cores."""
    import ray

    folder = tempfile.mkdtemp(prefix="manta-ray-")  # short: Ray puts sockets below it
    ray.init(
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
