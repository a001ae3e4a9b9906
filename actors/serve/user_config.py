"""Uses the drafter that a deployment's `user_config` names, without restarting the replica.

    user_config ─▶ configure ─▶ AsyncEngine.swap_drafter
    every POLL_S, without a user_config ─▶ that of the store, written by `manta drafter deploy`

Everything runs on the event loop except calls of the store.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from ...cluster.config import from_mapping
from ...cluster.errors import ConfigError
from ..engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

POLL_S = 1.0
NAMESPACE = b"manta"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUserConfig:
    """Settings of a replica. Changing them needs no restart and interrupts no request."""

    # folder, GGUF file or hub id of the drafter; None: the one that the replica started with. Tokens do not
    # depend on it. On the target's device it loads while requests wait.
    drafter: str | None = None

    def __post_init__(self) -> None:
        if self.drafter is not None and (not isinstance(self.drafter, str) or not self.drafter):
            field = "user_config.drafter"
            raise ConfigError(f"{field}={self.drafter!r} must be a folder, GGUF file or hub id.", param=field)

    @classmethod
    def of(cls, user_config: Mapping[str, Any]) -> Self:  # Any: YAML, checked here
        """Read a `user_config`. Raises ConfigError, which names the field."""
        return from_mapping(cls, user_config, "user_config.")


class UserConfigStore:
    """The `user_config` of a deployment that Serve was given none for, in Ray's internal key-value store.

    Serve keeps its own state there, so it lives as long as the application. Calls take a network round trip,
    so they must not run on an event loop.
    """

    def __init__(self, application: str, deployment: str) -> None:
        self._key = f"drafters/{application}/{deployment}/user_config".encode()

    def read(self) -> dict[str, Any] | None:  # Any: a user_config
        found = _internal_kv_get(self._key, namespace=NAMESPACE)
        return None if found is None else json.loads(found)

    def write(self, user_config: Mapping[str, Any]) -> None:  # Any: as above
        _internal_kv_put(self._key, json.dumps(user_config), overwrite=True, namespace=NAMESPACE)


class UserConfigFollower:
    """Swaps one replica's drafter as its `user_config` says. `store`: the deployment's."""

    def __init__(self, engine: AsyncEngine, store: UserConfigStore) -> None:
        self._engine, self._store = engine, store
        self._first = engine.drafter  # the drafter that the replica started with
        self._configured: Mapping[str, Any] = {}  # Any: YAML
        self._stored: Mapping[str, Any] | None = None  # what was last read from the store
        self._lock = asyncio.Lock()

    async def configure(self, user_config: Mapping[str, Any]) -> None:
        """Use the `user_config`'s drafter, else the store's; log errors, upon which Serve would end it."""
        async with self._lock:
            self._configured, self._stored = dict(user_config), None
            await self._use(self._configured or await asyncio.to_thread(self._store.read) or {})

    async def work_until(self, is_draining: Callable[[], bool]) -> None:
        """Follow the store until the replica drains: threads that read it may end then."""
        while not is_draining():
            try:
                async with self._lock:
                    await self._poll()
            except Exception:  # the task's outermost level: the store may be unavailable for a while
                logger.exception("the stored user_config could not be read")
            await asyncio.sleep(POLL_S)

    async def _poll(self) -> None:
        if self._configured:
            return
        stored = await asyncio.to_thread(self._store.read)
        if stored is not None and stored != self._stored:
            self._stored = stored
            await self._use(stored)

    async def _use(self, user_config: Mapping[str, Any]) -> None:
        try:
            drafter = ReplicaUserConfig.of(user_config).drafter or self._first
            if drafter is not None and drafter != self._engine.drafter:
                await self._engine.swap_drafter(drafter)
                logger.info("drafting with %s from now on", drafter)
        except ConfigError as error:
            logger.error("user_config is refused, and nothing changes: %s", error.message)
