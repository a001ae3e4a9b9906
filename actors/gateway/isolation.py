"""Isolates requests under which a replica died, and tests them, a few at a time.

Such a request is a suspect (`cluster/fleet/poison_requests.py`). Suspects wait in one queue per model and
take turns. At most half of a model's replicas (at least one) serve suspects, alongside ordinary requests. A
turn ends when the suspect has outlived the point at which the replica died, has ended, or has killed the
replica.

Most requests that kill do so early. So one that had not run for long is tested alone, and one that had is
tested beside others of its kind: each that passes lets one more run beside the next ones (1, 2, 4, 8, .. at a
time), so that a death without a cause in the requests costs the streams little. When a replica dies under
several, these have not run for long there, so each is tested alone. So a request that kills takes one other
replica with it, and two if it kills late. All requests of an API key under whose requests several replicas
died are suspects, one at a time. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import orjson

from ...cluster.errors import EngineDeadError, PoisonousRequestError, RateLimitError
from ...cluster.fleet.poison_requests import MAX_POISONOUS, TTL_S, DeathRecords
from .gateway_metrics import GatewayMetrics
from .replica_set import Fleet, Member, ServedModel

logger = logging.getLogger(__name__)

# New tokens after which a suspect has outlived its point of death; the dead replica may have computed that
# many more than it reported.
SURVIVED_TOKENS = 16
# Without reported tokens: a suspect has outlived it after 1.5 times as long as on the dead replica, within
# these bounds.
MIN_TRIAL_S, MAX_TRIAL_S = 3.0, 10.0
# Seconds that a suspect waits for its turn.
SUSPECT_TIMEOUT_S = 180.0
# Requests of a suspect key that wait for their turns.
MAX_WAITING_OF_KEY = 32
# Larger bodies are compared by their bytes, smaller ones as JSON.
CANONICAL_BYTES = 1 << 16
# Fields that do not affect what an engine computes.
_NAMES = frozenset({"request_id", "user", "metadata", "stream", "stream_options", "session_id"})


class Isolation:
    """A gateway's records of deaths under its requests, and the queues of suspects.

    `by_key`: deaths are also counted by API key. With one key there is no other to protect.
    """

    def __init__(self, fleet: Fleet, metrics: GatewayMetrics, *, by_key: bool) -> None:
        self.records = DeathRecords()
        self.fleet = fleet
        self.metrics = metrics
        self.by_key = by_key
        self._lines: dict[ServedModel, list[ReplicaAttempt]] = {}
        self._tests: dict[Member, list[SuspectRequest]] = {}
        self._num_together: dict[str, int] = {}  # by model: suspects that a replica may test, 1 if absent
        self._changed = asyncio.Event()

    @contextmanager
    def wait_turn(self, model: ServedModel, suspect: SuspectRequest) -> Iterator[ReplicaAttempt]:
        """Queue a request until a replica is taken. Only suspects wait.

        Raises RateLimitError if MAX_WAITING_OF_KEY requests of a suspect key wait already.
        """
        attempt = ReplicaAttempt(self, model, suspect)
        line = self._lines.setdefault(model, [])
        if suspect.has_suspect_key and sum(t.case.key == suspect.key for t in line) >= MAX_WAITING_OF_KEY:
            raise RateLimitError(
                "Replicas died while they served requests of this API key, so its requests run one after the "
                f"other, and {MAX_WAITING_OF_KEY} are waiting. Retry when some have ended."
            )
        line.append(attempt)
        try:
            yield attempt
        finally:
            line.remove(attempt)
            if line:
                self.notify()

    def next_suspect(self, model: ServedModel) -> SuspectRequest | None:
        """Return the waiting request that got the fewest tokens; those of suspect keys are last.

        Of equal requests, and of a suspect key's, only one is tested.
        """
        line = self._lines.get(model, ())
        testing = {each.tested_as for tests in self._tests.values() for each in tests}
        waiting = [t.case for t in line if t.case.is_suspect and t.case.identity not in testing]
        return min(waiting, key=lambda case: (case.has_suspect_key, case.num_tokens_received), default=None)

    def has_room(self, member: Member, suspect: SuspectRequest) -> bool:
        tests = self._tests.get(member, ())
        if any(each.is_tested_alone for each in (suspect, *tests)):
            return not tests
        return len(tests) < self._num_together.get(member.record.names[0], 1)

    def begin_test(self, member: Member, suspect: SuspectRequest) -> bool:
        """Return whether no other suspect is tested there."""
        tests = self._tests.setdefault(member, [])
        for other in tests:
            other.is_alone = False
        tests.append(suspect)
        member.tests_suspect = True
        return len(tests) == 1

    def end_test(self, member: Member, suspect: SuspectRequest) -> None:
        tests = self._tests[member]
        tests.remove(suspect)
        if not tests:
            member.tests_suspect = False
            del self._tests[member]
        self.notify()

    def has_culprit(self, member: Member, suspect: SuspectRequest) -> bool:
        """Whether another suspect is tested alone there."""
        return any(each.is_alone and each is not suspect for each in self._tests.get(member, ()))

    def on_passed(self, model: str) -> None:
        self._num_together[model] = self._num_together.get(model, 1) + 1

    def on_death(self, model: str) -> None:
        self._num_together.pop(model, None)

    def notify(self) -> None:
        """Wake all waiting suspects: a replica or a place in the queue is free."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return


class ReplicaAttempt:
    def __init__(self, isolation: Isolation, model: ServedModel, suspect: SuspectRequest) -> None:
        self.case = suspect
        self._isolation = isolation
        self._model = model
        self._began_s = time.monotonic()

    def take(self, chain: list[int], session: str | None, without: Iterable[str]) -> Member | None:
        """Choose a replica; None while the request must wait for its turn. Raises as `Fleet.choose` does.

        The caller enters `SuspectRequest.attempt` before it awaits anything else. Also raises
        PoisonousRequestError if the request kills replicas, EngineDeadError if it has waited too long.
        """
        self.case.check()
        fleet, metrics, name = self._isolation.fleet, self._isolation.metrics, self._model.names[0]
        if not self.case.is_suspect:
            member, choice = fleet.choose(self._model, chain, session, without=without)
            metrics.routed(name, choice)
            return member
        fleet.check(self._model)
        if self._isolation.next_suspect(self._model) is self.case:
            member = fleet.choose_for_suspect(
                self._model, lambda each: self._isolation.has_room(each, self.case), chain, without=without
            )
            if member is not None:
                metrics.isolated(name)
                return member
        if time.monotonic() - self._began_s > SUSPECT_TIMEOUT_S:
            raise EngineDeadError(
                "A replica died under this request, and no other was free to test it. Retry."
            )
        return None

    async def wait(self, timeout_s: float) -> None:
        await self._isolation.wait(timeout_s)


class SuspectRequest:
    """A request with its death records, and its trial on a replica if it is a suspect."""

    def __init__(self, isolation: Isolation, owner: str | None, path: str, body: bytes) -> None:
        self._isolation = isolation
        self._owner = owner or ""
        self.key = owner if isolation.by_key else None
        self._path = path
        self._body = body
        self.digest: bytes | None = None  # of key and request; None until it is needed
        self.tested_as = b""  # its identity during the test
        self.is_alone = False  # whether no other suspect was there so far
        self._has_run_long = False  # on the last replica that died under it
        self._tested_on: Member | None = None  # the replica, while it tests this suspect
        self._began_s = 0.0
        self.num_tokens_received = 0  # number of tokens that the request got in its last attempt

    async def identify(self) -> None:
        """Compute the digest if there are death records; call before `check`."""
        if self._isolation.records:
            await self._identify()

    async def _identify(self) -> bytes:
        if self.digest is None:
            if len(self._body) > CANONICAL_BYTES:
                self.digest = await asyncio.to_thread(_digest, self._owner, self._path, self._body)
            else:
                self.digest = _digest(self._owner, self._path, self._body)
        return self.digest

    @property
    def is_suspect(self) -> bool:
        if self.digest is None:
            return False
        return self.has_suspect_key or self._isolation.records.status_of(self.digest) == "suspect"

    @property
    def has_suspect_key(self) -> bool:
        return self._isolation.records.status_of_key(self.key) == "suspect"

    @property
    def is_tested_alone(self) -> bool:
        """Whether no other suspect is tested on its replica meanwhile."""
        return self.has_suspect_key or not self._has_run_long

    @property
    def identity(self) -> bytes:
        """Return what at most one replica tests at a time: the key if it is suspect, else the request."""
        assert self.digest is not None
        return self._owner.encode() if self.has_suspect_key else self.digest

    def check(self) -> None:
        """Raise PoisonousRequestError or RateLimitError if the request or its key kills replicas."""
        if self.digest is None:
            return
        if self._isolation.records.status_of(self.digest) == "poisonous":
            raise PoisonousRequestError(
                f"Replicas died while they served this request. It is refused for {TTL_S / 60:g} minutes. "
                "Do not retry it: send another request."
            )
        if self._isolation.records.status_of_key(self.key) == "poisonous":
            raise RateLimitError(
                f"Replicas died while they served {MAX_POISONOUS} different requests of this API key. Its "
                f"requests are refused for up to {TTL_S / 60:g} minutes. Find those that were answered with "
                "422, and do not send them."
            )

    @contextmanager
    def attempt(self, member: Member) -> Iterator[None]:
        """Mark the request as served by a replica, and as tested there if it is a suspect."""
        self._began_s, self.num_tokens_received = time.monotonic(), 0
        if not self.is_suspect:
            yield
            return
        assert self.digest is not None
        lived_s = self._isolation.records.lived_s(self.digest)
        max_s = min(max(1.5 * lived_s, MIN_TRIAL_S), MAX_TRIAL_S)
        self._tested_on, self.tested_as = member, self.identity
        self.is_alone = self._isolation.begin_test(member, self)
        timer = asyncio.get_running_loop().call_later(max_s, self._clear_suspicion)
        try:
            yield
        finally:
            timer.cancel()
            self._end_trial()

    def report_tokens(self, num_tokens: int) -> None:
        self.num_tokens_received = num_tokens
        if num_tokens >= SURVIVED_TOKENS:
            self._clear_suspicion()

    def _clear_suspicion(self) -> None:
        if self._tested_on is not None:
            assert self.digest is not None
            self._isolation.records.clear_suspicion(self.digest)
            self._isolation.on_passed(self._tested_on.record.names[0])
            self._end_trial()

    def _end_trial(self) -> None:
        if self._tested_on is not None:
            self._isolation.end_test(self._tested_on, self)
            self._tested_on = None

    def complete(self) -> None:
        self._clear_suspicion()
        if self.digest is not None:
            self._isolation.records.complete(self.digest)

    async def record_death(self, member: Member, request_id: str) -> None:
        """Record that the replica died under the request. Call `check` afterwards."""
        alone = self._tested_on is not None and self.is_alone
        self._isolation.on_death(member.record.names[0])
        lived_s = time.monotonic() - self._began_s
        num_tokens = self.num_tokens_received
        self._has_run_long = num_tokens >= SURVIVED_TOKENS if num_tokens else lived_s >= MIN_TRIAL_S
        has_culprit = self._isolation.has_culprit(member, self)
        digest = await self._identify()
        standing = self._isolation.records.record_death(
            digest, member.name, alone=alone, lived_s=lived_s, key=self.key, has_culprit=has_culprit
        )
        if standing == "poisonous":
            self._isolation.metrics.poisonous(member.record.names[0])
            logger.error(
                "request %s: replica %s died while it was the only suspect there, or as the third one under "
                "it; requests with the digest %s are refused for %g s",
                *(request_id, member.name, digest.hex()[:16], TTL_S),
            )


def _digest(owner: str, path: str, body: bytes) -> bytes:
    """Return the SHA-256 of key, route and body; short JSON without fields that have no effect."""
    if len(body) <= CANONICAL_BYTES:
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError:
            fields = None
        if isinstance(fields, dict):
            relevant = {name: value for name, value in fields.items() if name not in _NAMES}
            with suppress(orjson.JSONEncodeError):  # nested deeper than orjson writes: compared by bytes
                body = orjson.dumps(relevant, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(f"{owner}\0{path}\0".encode() + body).digest()
