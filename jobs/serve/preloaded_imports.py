"""Imports of the processes of `manta serve`, for the fork servers from which they start, and its checks.

Serve's processes come first: controller and proxies need no more than Ray Serve's libraries. Then replicas
and workers: HTTP, the engine and, where there is no GPU, PyTorch and Numba.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

from ...actors.http.config.settings import ServerSettings
from ...actors.system.wait_messages import Report
from ...actors.workers.base.fork_server import ForkServer, Stages
from ...cluster.config import EngineConfig
from .preflight import check_capture, describe_models

Models = Sequence[tuple[EngineConfig, ServerSettings]]

# Without Ray: what Ray Serve imports of others.
LIBRARIES = (
    *("numpy", "grpc", "google.protobuf.any_pb2", "jsonschema", "requests", "psutil", "aiohttp", "uvicorn"),
    *("fastapi.encoders", "starlette.middleware", "starlette.responses", "pydantic", "prometheus_client"),
    *("opentelemetry.sdk.trace", "filelock", "yaml", "cloudpickle"),
)
CHECKS = ("jobs.common.model_check", "actors.chat.chat_model")
HTTP = ("actors.http.app", "actors.engine.async_engine")
TARGET = (
    "actors.system.torch_threads",
    *("actors.targets.loading.rank_loader", "actors.targets.loading.drafter_swap"),
)
LOOPS = ("numba", "numba.typed")  # what compiled loops are loaded with, on a CPU
SERVE_UTILS = "ray.serve._private.utils"


def fork_server(models: Models) -> ForkServer | None:
    """Start the fork servers of these models; None where processes cannot start so."""
    if not ForkServer.is_possible():
        return None
    gpu = any(Path("/dev").glob("nvidia[0-9]*")) and any(config.device != "cpu" for config, _ in models)
    return ForkServer(
        Stages(
            first=_import_first,
            errand=lambda: b"" if gpu else _checked(models),
            of_errand=lambda: _import(() if gpu else CHECKS),
            second=lambda: _import(HTTP if gpu else (*HTTP, *TARGET)),
            third=None if gpu else lambda: _import_libraries(LOOPS),
        )
    )


class ServeWithoutPandas(MetaPathFinder):
    """Keeps Ray Serve from importing pandas, which takes half a second of each of its processes.

    Serve imports it where it is installed, to encode data frames; none is returned here. Other importers of
    pandas get it.
    """

    @classmethod
    def install(cls) -> None:
        sys.meta_path.insert(0, cls())

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        utils = sys.modules.get(SERVE_UTILS)
        if name == "pandas" and utils is not None and getattr(utils.__spec__, "_initializing", False):
            raise ImportError("Ray Serve works without pandas", name=name)


def _import_first() -> None:
    ServeWithoutPandas.install()
    _import_libraries(LIBRARIES)


def _import_libraries(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # of another version of Ray
            importlib.import_module(name)


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(f"...{name}", __package__)


def check_models(models: Models, report: Report, forks: ForkServer | None) -> None:
    """Read the checkpoints' settings, which imports torch: in a fork that has it already if possible."""
    answer = b"" if forks is None else forks.answer()
    descriptions = pickle.loads(answer or _checked(models))
    if isinstance(descriptions, Exception):
        raise descriptions
    for line in descriptions:
        report(line)


def _checked(models: Models) -> bytes:
    """Return the report about the models, or the error that was raised, pickled."""
    try:
        lines = [line for model in models for line in describe_models(*model)]
        for model in models:
            check_capture(*model)
    except Exception as error:  # raised again by the caller
        return pickle.dumps(error)
    return pickle.dumps(lines)
