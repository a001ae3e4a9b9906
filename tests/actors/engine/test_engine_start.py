"""The start of an `AsyncEngine`: tokenizer and models in parallel, and what remains if one fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from manta.actors.engine import async_engine as engine
from manta.actors.engine.async_engine import AsyncEngine
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError, ConfigError

WITHIN_S = 120.0


class Loaded:
    """An executor that can only be closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("first", ["the tokenizer", "the models"])
def test_an_engine_without_a_tokenizer_says_so_and_its_workers_end(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that still load when the failure is reported also end; the error does not wait for them."""
    reported, loaded, executor = threading.Event(), threading.Event(), Loaded()

    def make(config: EngineConfig) -> Any:
        assert first == "the models" or reported.wait(WITHIN_S), "the failure waits for the models"
        loaded.set()
        return executor

    def read(config: EngineConfig) -> Any:
        assert first == "the tokenizer" or loaded.wait(WITHIN_S), "the models wait for the tokenizer"
        raise ConfigError("There is no tokenizer.", param="tokenizer")

    monkeypatch.setattr(engine, "load_tokenizer", read)

    async def start() -> None:
        with pytest.raises(ConfigError, match="no tokenizer"):
            await AsyncEngine(EngineConfig(model="m"), make).start()
        reported.set()

    asyncio.run(start())  # and until its threads have ended
    assert loaded.is_set() and executor.num_closed > 0


def test_loading_errors_keep_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "load_tokenizer", lambda config: None)

    def make(config: EngineConfig) -> Any:
        raise CheckpointError("There is no such model.", param="model")

    with pytest.raises(CheckpointError, match="no such model") as caught:
        asyncio.run(AsyncEngine(EngineConfig(model="m"), make).start())
    assert caught.value.param == "model"
