"""One real server: overloaded, with a reader that stalls, soaked, and killed by pieces."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict

import openai
import pytest
from benchmarks.soak_serve import complaints, overload, overload_complaints, run_soak
from served import Served, wait_for
from serving_chaos import CONTROLLER, REPLICA, WORKER, Setup, Trial
from serving_load import Load
from text_pair import make_text_pair

SEATS, QUEUE = 8, 8
WARMING_BYTES = 256 * 2**20  # of loops that are compiled when a step first needs them


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    target, drafter = make_text_pair(folder)
    settings = {
        "model": str(target),
        "speculative_config": {"model": str(drafter)},
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": SEATS,
        "max_num_queued_reqs": QUEUE,
        "num_pages": 512,
        "num_threads": 1,
        "log_format": "json",
    }
    with Served(settings, folder / "log") as served:
        yield served
        assert served.end() == [], "something is left of the server"


@pytest.fixture(scope="module")
def trial(served: Served) -> Trial:
    return Trial(Setup("tests", ()), served, count=SEATS, tokens=400)  # enough that none ends before the blow


def test_overload_is_refused_as_openai_would_and_what_was_taken_goes_on(served: Served) -> None:
    found = overload(served.url, SEATS, QUEUE)
    assert found["asked"] == 4 * (SEATS + QUEUE) and found["ends"]["whole"] >= SEATS + QUEUE
    assert [said for said in overload_complaints(found) if "as long" not in said] == []  # no time is asserted


def test_a_reader_that_stalls_stalls_nobody_and_misses_nothing(served: Served, trial: Trial) -> None:
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(60)
        reader.connect(("127.0.0.1", served.port))
        body = {"prompt": "x", "max_tokens": 480, "n": 4, "ignore_eos": True, "stream": True, "seed": 1}
        content = json.dumps({**body, "temperature": 1.0, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        reader.sendall(
            f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + content
        )
        streams = Load(served.url, SEATS // 2, 400).join()  # the others' seats are the stalled one's
        assert [stream.text for stream in streams] == trial.texts[: SEATS // 2]
        seen = b""
        while piece := reader.recv(65536):
            seen += piece
    assert b"data: [DONE]" in seen and seen.count(b'"finish_reason":"length"') == 4


def test_memory_stays_and_pages_come_back_while_clients_come_and_go(served: Served) -> None:
    found = run_soak(served.url, 12.0, clients=4, pause_s=0.5)  # `make soak-serve` has minutes
    assert found["ends"]["whole"] > 4 < found["ends"]["left"]
    assert complaints(found, growth_bytes=WARMING_BYTES) == []


def test_after_the_death_of_a_worker_all_streams_are_told_to_retry_and_nothing_is_left(trial: Trial) -> None:
    found = trial.run(WORKER)
    assert (found.errors, found.retryable) == (SEATS, SEATS)
    assert found.left == [] and found.service_s is not None
    back = list(asdict(found.back).values())
    assert None not in back and back == sorted(back), "noticed, began, loaded, ready"
    assert set(found.refused_probes) <= {"503", "UnreachableError"}  # and never another failure


def test_the_death_of_a_lone_replica_is_an_error_of_the_connection_at_once_and_service_is_back(
    served: Served,
) -> None:
    """Nobody is left to write an event; OpenAI's client has the error that its own retries are for."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
    asked = {"model": client.models.list().data[0].id, "prompt": "x", "max_tokens": 480}
    pieces = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    next(iter(pieces))
    served.kill(REPLICA.victim(served))
    with pytest.raises(openai.APIConnectionError):
        list(pieces)
    wait_for(served.answers, 120.0, "no replica is back")


def test_the_death_of_serves_controller_is_nobodys_business(trial: Trial) -> None:
    found = trial.run(CONTROLLER)
    assert found.same == SEATS and found.left == [] and found.refused_probes == {}
