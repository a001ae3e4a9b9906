"""A tiny pair with a tokenizer, and what engines over it start with."""

from __future__ import annotations

from pathlib import Path

import pytest
from manta.cluster.config import EngineConfig
from support.checkpoints.text_pair import make_text_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target with a tokenizer and of its drafter, which no test changes."""
    return make_text_pair(tmp_path_factory.mktemp("engine-pair"))


@pytest.fixture(scope="session")
def plain(pair: tuple[Path, Path]) -> EngineConfig:
    """The target alone, in fp32 on one thread."""
    return EngineConfig(
        model=str(pair[0]), dtype="float32", device="cpu", max_num_seqs=8, num_pages=256, num_threads=1
    )
