"""Selects a replica's drafter by its deployment's `user_config` and by the outcome of a trial.

    user_config ─▶ configure ─▶ swap, or load a candidate ─▶ requests are assigned at random (async_engine.py)
    every POLL_S ─▶ store this replica's evidence, pool that of all ─▶ verdict (cluster/fleet/canary.py)
    ─▶ promote or remove the candidate, on every replica, by the first verdict stored

A verdict stays in the store, so a replica that starts later begins with it. Everything runs on the event loop
except calls of the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, get_args

from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
    internal_kv_get_gcs_client,
)

from ...cluster.config import from_mapping
from ...cluster.errors import ConfigError, MantaError
from ...cluster.fleet.canary import NO_EVIDENCE, ArmStats, CanaryTrial, Evidence, TrialRules, Verdict, decide
from ..engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCandidate:
    """A drafter that is tried on traffic before it replaces the current one."""

    drafter: str  # folder or hub id
    trial: str = ""  # name of the trial; another name tries the same candidate again
    # rules of the trial; in YAML its fields are next to these
    rules: TrialRules = field(default_factory=TrialRules)

    def __post_init__(self) -> None:
        _require_text("candidate.drafter", self.drafter)
        if not isinstance(self.trial, str):
            name = "user_config.candidate.trial"
            raise ConfigError(f"{name}={self.trial!r} must be a name, in quotes.", param=name)

    @classmethod
    def of(cls, candidate: object) -> Self:
        """Read a mapping. Raises ConfigError, which names the field."""
        if not isinstance(candidate, Mapping):
            raise ConfigError(
                f"user_config.candidate={candidate!r} must be a mapping, as {{drafter: ..., fraction: 0.1}}.",
                param="user_config.candidate",
            )
        settings, rules = dict(candidate), {each.name for each in fields(TrialRules)}
        ruled = {key: settings.pop(key) for key in list(settings) if key in rules}
        prefix = "user_config.candidate."
        return from_mapping(cls, {**settings, "rules": from_mapping(TrialRules, ruled, prefix)}, prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUserConfig:
    """Settings of a replica. Changing them needs no restart and interrupts no request."""

    # folder or hub id of the drafter; None: the one that the replica started with. Tokens do not depend on
    # it. On the target's device it loads while requests wait.
    drafter: str | None = None
    candidate: DrafterCandidate | None = None  # another drafter to try alongside it

    def __post_init__(self) -> None:
        if self.drafter is not None:
            _require_text("drafter", self.drafter)

    @property
    def trial_id(self) -> str:
        """Id of this trial, the same on all replicas."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @classmethod
    def of(cls, user_config: Mapping[str, Any]) -> Self:  # Any: YAML, checked here
        """Read a `user_config`. Raises ConfigError, which names the field."""
        settings = dict(user_config)
        if settings.get("candidate") is not None:
            settings["candidate"] = DrafterCandidate.of(settings["candidate"])
        return from_mapping(cls, settings, "user_config.")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        field = f"user_config.{name}"
        raise ConfigError(f"{field}={value!r} must be a folder or hub id.", param=field)


logger = logging.getLogger(__name__)

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    evidence: Evidence = NO_EVIDENCE  # the evidence it has collected
    refused: str | None = None  # why it does not take part; None if it does


class DrafterCanary:
    """The drafter control of one replica. `store`: the deployment's."""

    def __init__(
        self,
        engine: AsyncEngine,
        store: CanaryStore,
        replica: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._store, self._replica, self._clock = engine, store, replica, clock
        self._first = engine.drafter  # the drafter that the replica started with
        self._configured: Mapping[str, Any] = {}  # Any: YAML
        self._desired: Mapping[str, Any] | None = None
        self._candidate: DrafterCandidate | None = None  # on trial in this replica
        self._trial = ""  # id of the trial
        self._began_s = 0.0
        self._verdict: Verdict | None = None  # a verdict that ended no trial: "better"
        self._lock = asyncio.Lock()

    async def configure(self, user_config: Mapping[str, Any]) -> None:
        """Use the `user_config`'s drafter, else the store's; log errors, upon which Serve would end it."""
        async with self._lock:
            self._configured = dict(user_config)
            self._desired = None
            await self._follow(self._configured or await asyncio.to_thread(self._store.desired_config) or {})

    async def work_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                async with self._lock:
                    await self._poll()
            except Exception:  # the task's outermost level: the store may be unavailable for a while
                logger.exception("the drafter's trial could not be evaluated")

    async def _poll(self) -> None:
        if not self._configured:
            desired = await asyncio.to_thread(self._store.desired_config)
            if desired is not None and desired != self._desired:
                self._desired = desired
                await self._follow(desired)
        if self._candidate is not None and self._verdict is None:
            await self._judge(self._candidate)

    async def _judge(self, candidate: DrafterCandidate) -> None:
        trial, age_s = self._engine.trial, self._clock() - self._began_s
        assert trial is not None, "as long as there is a candidate"
        pooled = await asyncio.to_thread(self._exchange, ReplicaReport(trial.evidence))
        stored = await asyncio.to_thread(self._store.verdict, self._trial)
        found = stored or decide(candidate.rules, pooled, age_s)
        if found is None:
            return
        if stored is None:
            found = await asyncio.to_thread(self._store.set_verdict, self._trial, found)
        logger.info("the trial of %s has ended: %s; %s", candidate.drafter, found, _words(pooled))
        if found == "better":
            self._verdict = found
            return
        await self._end(found)

    def _exchange(self, report: ReplicaReport) -> Evidence:
        self._store.report(self._trial, self._replica, report)
        return Evidence.pooled(each.evidence for each in self._store.all_reports(self._trial).values())

    async def _follow(self, user_config: Mapping[str, Any]) -> None:
        try:
            await self._use(ReplicaUserConfig.of(user_config))
        except ConfigError as error:
            logger.error("user_config is refused, and nothing changes: %s", error.message)

    async def _use(self, wanted: ReplicaUserConfig) -> None:
        drafter, candidate = wanted.drafter or self._first, wanted.candidate
        trial = wanted.trial_id
        stored = await asyncio.to_thread(self._store.verdict, trial) if candidate is not None else None
        if candidate is not None and stored == "promoted":
            drafter, candidate = candidate.drafter, None
        elif stored in ("rolled_back", "undecided"):
            candidate = None
        if self._candidate is not None and (candidate is None or trial != self._trial):
            await self._end("promoted" if drafter == self._candidate.drafter else None)
        if drafter is not None and drafter != self._engine.drafter:
            await self._engine.swap_drafter(drafter)
            logger.info("drafting with %s from now on", drafter)
        if candidate is not None and candidate.drafter == drafter:
            name = "user_config.candidate.drafter"
            raise ConfigError(f"{name}={drafter!r} is already the drafter.", param=name)
        if candidate is not None and self._candidate is None:
            await self._begin(candidate, trial, stored)

    async def _begin(self, candidate: DrafterCandidate, trial: str, stored: Verdict | None) -> None:
        """Begin a trial. Raises ConfigError after storing it as this replica's report."""
        self._trial, self._verdict = trial, stored
        try:
            await self._engine.begin_trial(candidate.drafter, CanaryTrial(candidate.rules))
        except MantaError as error:
            report = ReplicaReport(refused=error.message)
            await asyncio.to_thread(self._store.report, trial, self._replica, report)
            raise
        self._candidate = candidate
        self._began_s = await asyncio.to_thread(self._store.began_s, trial, self._clock())
        how = (
            "in shadow mode" if candidate.rules.shadow else f"for {candidate.rules.fraction:.0%} of requests"
        )
        logger.info("%s is on trial %s, next to %s", candidate.drafter, how, self._engine.drafter)

    async def _end(self, found: Verdict | None) -> None:
        """End the trial in this replica. None: it was withdrawn."""
        self._candidate = None
        await self._engine.end_trial(found)
        logger.info("drafting with %s from now on", self._engine.drafter)


def _words(evidence: Evidence) -> str:
    incumbent, candidate = (
        f"{tally.tokens_per_step or 0.0:.3f} tokens per step over {tally.requests} requests"
        for tally in (evidence.incumbent, evidence.candidate)
    )
    return f"the candidate has {candidate}, the other {incumbent}"


NAMESPACE = b"manta"


class CanaryStore:
    """The trial state of one deployment of one application, in Ray's internal key-value store.

    Serve keeps its own state there, so it lives as long as the application. Every replica writes under its
    own key; the first verdict is final. Calls take a network round trip, so they must not run on an event
    loop.
    """

    def __init__(self, application: str, deployment: str) -> None:
        self._prefix = f"drafters/{application}/{deployment}/"

    def desired_config(self) -> dict[str, Any] | None:  # Any: a user_config
        """Return the stored replacement for a `user_config` that Serve was not given."""
        found = _internal_kv_get(self._key("wish"), namespace=NAMESPACE)
        return None if found is None else json.loads(found)

    def set_desired_config(self, user_config: dict[str, Any]) -> None:  # Any: as above
        _internal_kv_put(self._key("wish"), json.dumps(user_config), overwrite=True, namespace=NAMESPACE)

    def began_s(self, trial: str, now_s: float) -> float:
        """Return the Unix time of any replica's first call for this trial."""
        return float(self._set_once(f"{trial}/began", repr(now_s)))

    def report(self, trial: str, replica: str, report: ReplicaReport) -> None:
        text = json.dumps(asdict(report))
        _internal_kv_put(self._key(f"{trial}/of/{replica}"), text, overwrite=True, namespace=NAMESPACE)

    def all_reports(self, trial: str) -> dict[str, ReplicaReport]:
        """Return the reports by replica, also of those that are gone: their evidence counts."""
        prefix = self._key(f"{trial}/of/")
        keys = _internal_kv_list(prefix, namespace=NAMESPACE)
        client = internal_kv_get_gcs_client()
        found = client.internal_kv_multi_get(keys, NAMESPACE) if keys and client is not None else {}
        return {key[len(prefix) :].decode(): _report(json.loads(text)) for key, text in found.items()}

    def verdict(self, trial: str) -> Verdict | None:
        found = _internal_kv_get(self._key(f"{trial}/verdict"), namespace=NAMESPACE)
        return None if found is None else _verdict(found.decode())

    def set_verdict(self, trial: str, verdict: Verdict) -> Verdict:
        """Store the verdict unless there is one. Return the one in effect."""
        return _verdict(self._set_once(f"{trial}/verdict", verdict))

    def clear(self) -> None:
        _internal_kv_del(self._key(""), del_by_prefix=True, namespace=NAMESPACE)

    def _set_once(self, name: str, value: str) -> str:
        key = self._key(name)
        _internal_kv_put(key, value, overwrite=False, namespace=NAMESPACE)
        found = _internal_kv_get(key, namespace=NAMESPACE)
        assert found is not None, "another replica wrote it"
        return found.decode()

    def _key(self, name: str) -> bytes:
        return (self._prefix + name).encode()


def _report(stored: dict[str, Any]) -> ReplicaReport:  # Any: JSON
    found = stored["evidence"]
    logs = found["log_better"], found["log_worse"]
    evidence = Evidence(*logs, ArmStats(*found["incumbent"]), ArmStats(*found["candidate"]))
    return ReplicaReport(evidence, stored["refused"])


def _verdict(text: str) -> Verdict:
    (found,) = (each for each in get_args(Verdict) if each == text)
    return found
