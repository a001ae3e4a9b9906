"""Settings of engines with workers in other processes, and the tokens that all of them give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.engine.engine_core import EngineCore
from support.engines.ray_engines import BASE, run_all


@pytest.fixture(scope="session")
def plain(tiny_qwen3: Path) -> EngineConfig:
    """A target without a drafter."""
    return replace(BASE, model=str(tiny_qwen3), num_pages=96)


@pytest.fixture(scope="session")
def speculative(plain: EngineConfig, tiny_drafter: Path) -> EngineConfig:
    """The target with a drafter beside it, which drafts in every step."""
    return replace(plain, speculative_config=SpeculativeConfig(model=str(tiny_drafter), adaptive=False))


@pytest.fixture(scope="session")
def split(speculative: EngineConfig) -> EngineConfig:
    """The target with a drafter in a process of its own."""
    assert speculative.speculative_config is not None
    return replace(speculative, speculative_config=replace(speculative.speculative_config, placement="split"))


@pytest.fixture(scope="session")
def expected(plain: EngineConfig) -> list[list[int]]:
    """The tokens of all requests by plain decoding in this process."""
    executor = InProcessExecutor(plain)
    tokens = run_all(EngineCore(plain, executor))
    executor.close()
    return tokens
