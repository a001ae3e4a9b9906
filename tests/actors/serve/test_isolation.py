"""How many suspects a replica tests at a time, and which of them are blamed for its death."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

import pytest
from manta.actors.gateway.gateway_metrics import GatewayMetrics
from manta.actors.gateway.isolation import SURVIVED_TOKENS, Isolation, ReplicaAttempt, SuspectRequest
from manta.actors.gateway.replica_set import Fleet, Member, ServedModel
from manta.cluster.errors import PoisonousRequestError
from support.servers.gateway_stand import LocalDirectory, replica_record

LATE, EARLY = SURVIVED_TOKENS, SURVIVED_TOKENS - 1  # tokens of a request when its replica dies


class Suspects:
    """Requests under which replicas died."""

    def __init__(self, stack: ExitStack, num_replicas: int) -> None:
        self._stack = stack
        self._fleet = Fleet([ServedModel(("m",))], LocalDirectory())
        self._fleet.update(replica_record(f"r{i}", 1, max_requests=99) for i in range(num_replicas))
        self._isolation = Isolation(self._fleet, GatewayMetrics(self._fleet, "g"), by_key=False)
        self._waiting: list[tuple[ReplicaAttempt, ExitStack]] = []
        self._running: dict[SuspectRequest, tuple[Member, ExitStack]] = {}
        self._num_requests = 0

    async def begin(self, num_tokens: list[int]) -> None:
        """Let the first living replica die under new requests, each with so many tokens."""
        first, *_ = self._fleet.ready(self._fleet.models[0])
        for count in num_tokens:
            self._num_requests += 1
            case = SuspectRequest(self._isolation, None, "/v1/completions", b"%d" % self._num_requests)
            self._start(case, first)
            case.report_tokens(count)
        await self.kill(first)

    def finish(self, case: SuspectRequest) -> None:
        case.complete()
        self._running.pop(case)[1].close()

    def _start(self, case: SuspectRequest, member: Member) -> None:
        attempt = self._stack.enter_context(ExitStack())
        attempt.enter_context(case.attempt(member))
        self._running[case] = member, attempt

    async def kill(self, member: Member) -> None:
        """Let a replica die; its requests wait for their turns, but for those that are refused."""
        self._fleet.mark_broken(member)
        for case, (there, attempt) in list(self._running.items()):
            if there is member:
                await case.record_death(member, "id")
                attempt.close()
                del self._running[case]
                with suppress(PoisonousRequestError):
                    case.check()
                    self._wait(case)

    def _wait(self, case: SuspectRequest) -> None:
        turn = self._stack.enter_context(ExitStack())
        waiting = self._isolation.wait_turn(self._fleet.models[0], case)
        self._waiting.append((turn.enter_context(waiting), turn))

    def admit(self) -> dict[SuspectRequest, Member]:
        """Return the requests whose turn it is now, with their replicas."""
        admitted: dict[SuspectRequest, Member] = {}
        has_changed = True
        while has_changed:
            has_changed = False
            for attempt, turn in list(self._waiting):
                if (member := attempt.take([], None, ())) is not None:
                    self._waiting.remove((attempt, turn))
                    self._start(attempt.case, member)
                    turn.close()
                    admitted[attempt.case], has_changed = member, True
        return admitted


@pytest.mark.parametrize(
    ("num_tokens", "turns"),
    [([LATE] * 32, [1, 2, 4, 8, 16, 1]), ([EARLY] * 4, [1, 1, 1, 1]), ([LATE, EARLY, LATE], [1, 2])],
    ids=["late", "early", "both"],
)
def test_suspects_that_had_run_for_long_are_tested_in_growing_groups(
    num_tokens: list[int], turns: list[int]
) -> None:
    async def test() -> None:
        with ExitStack() as stack:
            suspects = Suspects(stack, 4)
            for _ in range(2):  # the second death begins anew
                await suspects.begin(num_tokens)
                found: list[int] = []
                while admitted := suspects.admit():
                    assert len(set(admitted.values())) == 1, "half of the replicas test"
                    found.append(len(admitted))
                    for case in admitted:
                        case.report_tokens(SURVIVED_TOKENS)
                    for case in admitted:
                        suspects.finish(case)
                assert found == turns

    asyncio.run(test())


def test_after_a_death_in_a_group_each_of_it_is_tested_alone_and_only_the_killer_is_blamed() -> None:
    async def test() -> None:
        with ExitStack() as stack:
            suspects = Suspects(stack, 4)
            await suspects.begin([LATE] * 7)
            for size in (1, 2):
                admitted = suspects.admit()
                assert len(admitted) == size
                for case in admitted:
                    case.report_tokens(SURVIVED_TOKENS)
                    suspects.finish(case)
            group = suspects.admit()
            assert len(group) == 4
            await suspects.kill(next(iter(group.values())))
            for case in group:
                case.check()
            for _ in range(2):
                (innocent,) = suspects.admit()
                innocent.report_tokens(SURVIVED_TOKENS)
                assert innocent in group and not innocent.is_suspect
            (killer,) = alone = suspects.admit()
            await suspects.kill(alone[killer])
            with pytest.raises(PoisonousRequestError):
                killer.check()
            for case in group.keys() - {killer}:
                case.check()

    asyncio.run(test())
