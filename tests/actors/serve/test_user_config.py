"""A replica's drafter follows its `user_config`, or the store's without one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manta.actors.serve import user_config
from manta.actors.serve.user_config import ReplicaUserConfig, UserConfigFollower
from manta.cluster.errors import ConfigError


class MemoryStore:
    """A stand-in for Ray's internal key-value store."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        return self.stored


class Engine:
    """A stand-in for an engine that records what it loads."""

    def __init__(self) -> None:
        self.drafter, self.loads = "a", list[str]()

    async def swap_drafter(self, model: str) -> None:
        if model == "misfit":
            raise ConfigError("It does not fit.", param="speculative_config.model")
        self.loads.append(model)
        self.drafter = model


def follower() -> tuple[UserConfigFollower, Engine, MemoryStore]:
    engine, store = Engine(), MemoryStore()
    return UserConfigFollower(engine, store), engine, store  # type: ignore[arg-type]


def test_the_drafter_is_swapped_and_the_first_one_is_used_again_without_a_setting() -> None:
    async def run() -> None:
        replica, engine, _ = follower()
        for drafter in ("a", "b", "b"):
            await replica.configure({"drafter": drafter})
        assert engine.loads == ["b"], "only another drafter is loaded"
        await replica.configure({})
        assert engine.drafter == "a"

    asyncio.run(run())


def test_the_store_is_not_read_while_the_replica_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_config, "POLL_S", 0.0)
    replica, _, store = follower()
    states = iter([False, False, True])
    reads: list[None] = []
    monkeypatch.setattr(store, "read", lambda: reads.append(None))
    asyncio.run(replica.work_until(lambda: next(states)))
    assert len(reads) == 2


def test_a_wrong_user_config_is_refused_and_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        replica, engine, _ = follower()
        for wrong in ({"drafter": "misfit"}, {"drafter": 1}, {"candidate": {"drafter": "b"}}):
            await replica.configure(wrong)
        assert engine.drafter == "a" and not engine.loads
        assert caplog.text.count("user_config is refused, and nothing changes") == 3
        await replica.configure({"drafter": "b"})
        assert engine.drafter == "b"

    asyncio.run(run())


def test_without_user_config_the_stored_drafter_is_used() -> None:
    async def run() -> None:
        replica, engine, store = follower()
        await replica.configure({})
        store.stored = {"drafter": "b"}
        await replica._poll()
        await replica._poll()
        assert engine.loads == ["b"]
        late, its_engine, its_store = follower()
        its_store.stored = store.stored
        await late.configure({})
        assert its_engine.drafter == "b", "a replica that starts later"
        await replica.configure({"drafter": "c"})
        await replica._poll()
        assert engine.drafter == "c", "Serve's own setting counts"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"draftr": "b"}, "user_config.draftr. Did you mean"), ({"drafter": ""}, "user_config.drafter")],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ReplicaUserConfig.of(wrong)
