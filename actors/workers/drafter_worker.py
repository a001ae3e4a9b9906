"""The drafter as a process of its own. Wrapped by `drafter_process.py`; the work is `drafter_server.py`'s.

Ray calls it with several threads: `start` and `watch` wait, the questions do not. All computing is done by
one thread, which loads the drafter and then serves.
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

from ...cluster.config import EngineConfig
from ...cluster.placement import Topology
from ..process_log import LogSettings, log_to_stderr
from .worker import open_device

if TYPE_CHECKING:
    from .drafter_server import DrafterServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSetup:
    """All that a drafter is told before it loads.

    Attributes:
        config: of the engine that starts it, with absolute paths and the topology's device.
        topology: of that engine.
        log: how the process of that engine logs, where that was set up.
        environment: settings of libraries, taken over where this process has none of its own.
        linger_s: it leaves when it has had no engine for so long; infinite for one that belongs to an engine.
    """

    config: EngineConfig
    topology: Topology
    log: LogSettings | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    linger_s: float = math.inf


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What a drafter says when it has loaded. `address` is of its door (`doors.knock`)."""

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
        """Answers as soon as the process has its place."""
        return os.getpid()

    def start(self, setting: DrafterSetup) -> DrafterFacts:
        """Load, or wait until what somebody else asked for is loaded. Raises CheckpointError, ConfigError."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._live, args=[setting], name="manta-drafter", daemon=True
                )
                self._thread.start()
        return self._facts.result()

    def watch(self) -> str:
        """Does not return while the drafter serves."""
        self._ended.wait()
        return "The drafter has ended."

    def _live(self, setting: DrafterSetup) -> None:
        """The thread that computes."""
        try:
            server = self._load(setting)
        except BaseException as error:  # a thread's edge: whoever waits for `start` is told
            self._facts.set_exception(error)
            return
        self._facts.set_result(DrafterFacts(os.getpid(), server.address))
        try:
            server.serve(setting.linger_s)
            logger.info("no engine has needed this drafter for %g s", setting.linger_s)
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
        from ..targets.loading.plan import plan_load
        from .drafter_seat import LoadedDrafter
        from .drafter_server import DrafterServer

        drafter = LoadedDrafter(plan_load(setting.config))
        drafter.warm_up()
        return DrafterServer(lambda hello: drafter.seat(plan_load(hello.config), hello.num_pages))
