"""One real server: overloaded, with a stalled reader, soaked, with killed processes, and stopped."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import httpx
import openai
import pytest
from benchmarks.serving.soak_serve import complaints, overload, overload_complaints, run_soak
from support.checkpoints.text_pair import make_text_pair
from support.servers.served import Served
from support.waiting import wait_until
from trials.serving.serving_chaos import CONTROLLER, REPLICA, WORKER, Setup, Trial
from trials.serving.serving_load import Load

SEATS, QUEUE = 8, 8
CONTEXT = 4096  # streams can last longer than a server that ends waits for them
WAIT_S = 120.0
WARMING_BYTES = 256 * 2**20  # of loops that are compiled when a step first needs them


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    target, drafter = make_text_pair(folder)
    for file in (target / "config.json", drafter / "config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": CONTEXT}))
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
        "shutdown_timeout": 2,
    }
    with Served(settings, folder / "log") as served:
        yield served
        assert served.end() == [], "something is left of the server"


@pytest.fixture(scope="module")
def trial(served: Served) -> Trial:
    return Trial(Setup("tests", ()), served, count=SEATS, tokens=400)  # enough that none ends before the blow


def test_overload_is_refused_as_by_openai_and_accepted_requests_continue(served: Served) -> None:
    found = overload(served.url, SEATS, QUEUE)
    assert found["asked"] == 4 * (SEATS + QUEUE) and found["ends"]["whole"] >= SEATS + QUEUE
    assert [said for said in overload_complaints(found) if "as long" not in said] == []  # no time is asserted


def test_a_stalled_reader_delays_no_others_and_misses_nothing(served: Served, trial: Trial) -> None:
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(600)
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


def test_memory_is_constant_and_pages_are_freed_while_clients_come_and_go(served: Served) -> None:
    found = run_soak(served.url, 5.0, clients=4, pause_s=0.5)  # `make soak-serve` has minutes
    assert found["ends"]["whole"] > 1 < found["ends"]["left"]  # more where the machine is idle
    assert complaints(found, growth_bytes=WARMING_BYTES) == []


def test_after_a_workers_death_all_streams_get_a_retryable_error_and_nothing_remains(trial: Trial) -> None:
    found = trial.run(WORKER)
    assert (found.errors, found.retryable) == (SEATS, SEATS)
    assert found.left == [] and found.service_s is not None
    back = list(asdict(found.back).values())
    assert None not in back and back == sorted(back), "noticed, began, loaded, ready"
    assert set(found.refused_probes) <= {"503", "UnreachableError"}  # and never another failure


def test_a_single_replicas_death_closes_connections_and_service_returns(
    served: Served,
) -> None:
    """No process is left to write an event; OpenAI's client raises an error that it retries."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=600)
    requested = {"model": client.models.list().data[0].id, "prompt": "x", "max_tokens": 480}
    pieces = client.completions.create(**requested, stream=True, extra_body={"ignore_eos": True})
    next(iter(pieces))
    served.kill(REPLICA.victim(served))
    with pytest.raises(openai.APIConnectionError):
        list(pieces)
    wait_until(served.answers, 120.0, "no replica is back")


def test_the_death_of_serves_controller_affects_no_request(trial: Trial) -> None:
    found = trial.run(CONTROLLER)
    assert found.same == SEATS and found.left == [] and found.refused_probes == {}


def stream(url: str, n: int, max_tokens: int, began: threading.Event) -> str:
    """Return the last two events of a stream."""
    body = {"prompt": "x", "n": n, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
        events = []
        for line in response.iter_lines():
            began.set()
            events += [line] if line else []
    return "\n".join(events[-2:])


def test_a_stopping_server_accepts_no_request_and_finishes_streams(
    served: Served,
) -> None:
    assert served.start_statuses <= {0, 503, 200}, "never 404 while it loads"
    process = served.process
    assert process is not None
    wait_until(served.answers, WAIT_S, "the replica is not back")
    said_before = len(served.log.read_text(errors="replace"))

    def said() -> str:
        return served.log.read_text(errors="replace")[said_before:]

    with ThreadPoolExecutor(4) as pool:
        started = [threading.Event() for _ in range(2)]
        short = pool.submit(stream, served.url, 1, 24, started[0])
        assert started[0].wait(WAIT_S), "it would wait behind the others"
        # More completions than the engine has slots for.
        long = [pool.submit(stream, served.url, 4, CONTEXT - 96, started[1]) for _ in range(3)]
        assert started[1].wait(WAIT_S)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "no new requests" in said() and served.health() == 503, WAIT_S, "it goes on")
        refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x"}, timeout=600)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        last = [each.result(WAIT_S) for each in long]
        # Requests that had not begun get the status.
        assert all(events.endswith("data: [DONE]") or '"code":503' in events for events in last), last
        over = "the time for running requests is over"
        assert any(over in events for events in last), "2 s are not enough for all"
        assert '"finish_reason":"length"' in short.result(WAIT_S)
        assert process.wait(WAIT_S) == 0, said()
    assert "drained in" in said() and "\x1b[" not in said() and "pid=" not in said()
    scripts = [script.read_text() for script in Path("/tmp").glob("manta-ha-*/haproxy")]
    assert not any(f"--owner {process.pid} " in script for script in scripts), "its folder is gone"
