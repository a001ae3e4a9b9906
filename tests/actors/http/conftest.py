"""Live HTTP servers of a tiny pair: one that all files of a process share, and others with own settings.

Tests that share a server compare counters with earlier values. A file whose server has other settings
overrides `server`; `http` and `client` then belong to that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from manta.actors.http.config.settings_mapping import split_settings
from manta.cluster.config import EngineConfig
from manta.cluster.step.executor import Executor
from support.checkpoints.text_pair import LiveServer, make_text_pair, tiny_settings
from support.engines.pausable_executor import PausableExecutors
from support.servers.server_probes import Serve, http_client, openai_client


@pytest.fixture(scope="session")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target with a tokenizer and its drafter; no test changes them."""
    return make_text_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def engine_args(text_pair: tuple[Path, Path]) -> dict[str, Any]:
    """Settings of the shared server: blocks of a known size, the model's name is `tiny`."""
    drafter = {"model": str(text_pair[1]), "adaptive": False}
    common = {"served_model_name": "tiny", "max_num_seqs": 8, "num_pages": 256}
    return tiny_settings(text_pair, speculative_config=drafter, **common)


@pytest.fixture(scope="session")
def config(engine_args: dict[str, Any]) -> EngineConfig:
    """The engine's part of `engine_args`."""
    return split_settings(engine_args)[0]


@pytest.fixture(scope="session")
def serve(engine_args: dict[str, Any]) -> Serve:
    """Return serve(make, max_requests, **settings): a server for a `with` statement, with other settings.

    Settings are those of `engine_args` unless given; `make` makes the executor instead of the real one.
    """

    def serve(
        make: Callable[[EngineConfig], Executor] | None = None,
        max_requests: int | None = None,
        **settings: Any,
    ) -> LiveServer:
        return LiveServer(*split_settings({**engine_args, **settings}), make, max_requests)

    return serve


@pytest.fixture(scope="session")
def executors() -> PausableExecutors:
    """The executor of the shared server, which a test can pause."""
    return PausableExecutors()


@pytest.fixture(scope="session")
def server(serve: Serve, executors: PausableExecutors) -> Iterator[LiveServer]:
    with serve(executors.make) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with http_client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    """OpenAI's client of the server."""
    return openai_client(server.url)
