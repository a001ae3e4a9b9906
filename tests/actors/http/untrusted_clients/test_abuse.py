"""A few seconds of hostile clients against a real server; `make abuse` is the long form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.probed_server import ProbedServer
from trials.abuse.abuse import MODEL, refuse_nonsense, suffer
from trials.abuse.abuse_clients import be_silent, leave, read_slowly
from trials.abuse.abuse_hostile import HOSTILE, KEYS, run_hostile

GROWTH_BYTES = 32 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ProbedServer]:
    with ProbedServer(MODEL) as server:
        yield server


def test_nonsense_gets_an_error_in_openais_form(server: ProbedServer) -> None:
    assert refuse_nonsense(server.port) == []
    assert not server.rest().busy(None)


def test_clients_that_disconnect_or_stall_leave_no_resources_behind(server: ProbedServer) -> None:
    attacks = {
        "departures": lambda port: leave(port, 70),
        "slow readers": lambda port: read_slowly(port, 3, 8, 150),
        "silent streams": lambda port: be_silent(port, 150),
    }
    for name, _, wrong in suffer(server, attacks, 2, GROWTH_BYTES):
        assert wrong == [], name


def test_hostile_requests_get_the_listed_status_while_another_keys_stream_continues(tmp_path: Path) -> None:
    """HAProxy's refusals are omitted, and pauses too, which depend on the machine's other load."""
    settings = {"batch_storage": str(tmp_path / "b"), "api_key": KEYS}
    with ProbedServer(MODEL, settings) as server:
        outcomes = list(run_hostile(server.port, [each for each in HOSTILE if not each.own_words]))
        assert not server.rest().busy(None)
    wrong = [each for each in outcomes if each.wrong and "paused" not in each.wrong]
    assert wrong == [], "\n".join(map(str, wrong))
    assert len(outcomes) > 60
