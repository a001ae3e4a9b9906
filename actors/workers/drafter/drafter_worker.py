"""The drafter in a process of its own. Wrapped by `drafter_process.py`; `drafter_server.py` does the work.

Ray calls it from several threads, of which those in `start` and `watch` wait. One thread, which loads the
drafter and then serves, does all the computing.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ....cluster.config import EngineConfig
from ....cluster.fleet.placement import Topology
from ...system.log_setup import LogSettings, log_to_stderr
from ..base.worker_base import open_device

if TYPE_CHECKING:
    from .drafter_server import DrafterServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSetup:
    config: EngineConfig  # that of the engine that starts it, with absolute paths and the topology's device
    topology: Topology  # that of this engine
    log: LogSettings | None = None  # log settings of this engine's process, if it has any
    # variables for libraries, set here unless this process has them
    environment: Mapping[str, str] = field(default_factory=dict)
    linger_s: float = math.inf  # exit after this time without an engine; infinite for an engine's own drafter


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """`address` is that of its listener (`abstract_sockets.connect`)."""

    pid: int
    address: str = field(repr=False)  # a secret


class DrafterWorker:
    """Holds the whole drafter, and copies of the target's embedding and head."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: Future[DrafterFacts] = Future()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def pid(self) -> int:
        """Answers as soon as the process has started."""
        return os.getpid()

    def start(self, setting: DrafterSetup) -> DrafterFacts:
        """Load the drafter, or wait for a load in progress. Raises CheckpointError, ConfigError."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._load_and_serve, args=[setting], name="manta-drafter", daemon=True
                )
                self._thread.start()
        return self._facts.result()

    def watch(self) -> str:
        """Return when the drafter no longer serves."""
        self._ended.wait()
        return "The drafter has ended."

    def _load_and_serve(self, setting: DrafterSetup) -> None:
        try:
            server = self._load(setting)
        except BaseException as error:  # reported to the callers of `start`
            self._facts.set_exception(error)
            return
        self._facts.set_result(DrafterFacts(os.getpid(), server.address))
        try:
            server.serve(setting.linger_s)
            logger.info("exiting, as no engine has used this drafter for %g s", setting.linger_s)
        except Exception:
            logger.exception("the drafter failed")
        finally:
            self._ended.set()
            os._exit(0)  # Ray would keep the process of a detached actor

    def _load(self, setting: DrafterSetup) -> DrafterServer:
        if setting.log is not None:
            log_to_stderr(setting.log.of(process="drafter"))
        for name, value in setting.environment.items():
            os.environ.setdefault(name, value)
        open_device(setting.topology, setting.config)
        from ...targets.loading.resolved_config import resolve_config
        from .drafter_server import DrafterServer
        from .drafter_session import LoadedDrafter

        drafter = LoadedDrafter(resolve_config(setting.config))
        drafter.warm_up()
        return DrafterServer(
            lambda hello: drafter.make_session(resolve_config(hello.config), hello.num_pages)
        )
