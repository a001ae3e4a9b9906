"""HAProxy under its supervisor, with the configuration of the installed Serve. Processes, no Ray."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from manta.actors.haproxy.config_rewriter import UNFINISHED, UNFINISHED_HEADER, HAProxyPaths, rewritten
from manta.actors.haproxy.connections import MOST, PER_SOURCE, PROBE_PORT, Connections
from manta.actors.haproxy.metrics_aggregator import joined
from manta.actors.haproxy.run_dir import HAProxyFolder
from manta.actors.system.host_resources import free_port
from manta.cluster.errors import ConfigError
from manta.jobs.serve import ray_environment as serve_environment
from prometheus_client.parser import text_string_to_metric_families
from support.paths import TESTS
from support.servers.haproxy_front import HAProxyFront, Replica
from support.waiting import WAIT_S, wait_until


@pytest.fixture
def front() -> Iterator[HAProxyFront]:
    with closing(HAProxyFront(HAProxyFolder())) as front:
        yield front


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    made = [Replica("a"), Replica("b")]
    yield made
    for replica in made:
        replica.shutdown()


def test_a_killed_haproxy_is_restarted_unseen_by_serve(front: HAProxyFront, replicas: list[Replica]) -> None:
    front.serve(replicas)
    before = front.haproxy_pid()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: front.ask("/v1/models")[0] == 200)
    assert front.haproxy_pid() != before
    wait_until(lambda: front.reported_pid() == front.processes[-1].pid)
    front.start(replicas[:1])  # a reload: the new one takes over, the old one ends, and stays so
    assert front.processes[0].wait(WAIT_S) == 0
    assert front.ask("/v1/models") == (200, "a")
    front.processes[-1].kill()
    wait_until(lambda: front.ask("/v1/models")[0] == 0)  # no connection remains


def test_probes_follow_the_replicas_and_a_stopping_server_refuses_in_openais_form(
    front: HAProxyFront, replicas: list[Replica]
) -> None:
    front.start([])
    for path in ("/health", "/ping", "/v1/models"):
        status, body = front.ask(path)
        assert status == 503 and json.loads(body)["error"]["code"] == 503, path
    front.serve(replicas)
    assert {line for line in front.ask("/metrics")[1].splitlines() if line.startswith("x_total")} == {
        'x_total{replica="a"} 1.0',
        'x_total{replica="b"} 1.0',
    }
    for replica in replicas:
        replica.key = "Bearer scrape"
    status, body = front.ask("/metrics")
    assert status == 401 and "x_total" not in body
    assert front.ask("/metrics", headers={"Authorization": "Bearer wrong"})[0] == 401
    status, body = front.ask("/metrics", headers={"Authorization": "Bearer scrape"})
    assert status == 200 and body.count("x_total{") == 2
    for replica in replicas:
        replica.key = ""
    front.folder.refuse_requests()
    status, body = front.ask("/v1/models")
    assert status == 503 and "stopping" in json.loads(body)["error"]["message"]
    assert front.ask("/health")[0] == 503 and front.ask("/metrics")[0] == 200
    front.start(replicas)  # also after a reload
    assert front.ask("/v1/models")[0] == 503


def test_requests_refused_by_a_draining_replica_are_resent_unless_they_store_something(
    front: HAProxyFront, replicas: list[Replica]
) -> None:
    front.serve(replicas)
    replicas[0].status = 425
    assert {front.ask("/v1/completions", "POST") for _ in range(6)} == {(200, "b")}
    replicas[1].status = 425
    assert front.ask("/v1/completions", "POST")[0] == 503
    requested = sum(replica.asked for replica in replicas)
    assert front.ask("/v1/batches", "POST")[0] == 503
    assert sum(replica.asked for replica in replicas) == requested + 1


def test_one_gateway_gets_all_requests_until_it_is_gone(front: HAProxyFront) -> None:
    """So that one process counts a key's requests. Serve names a replacement anywhere among the others."""
    first, second, third = (Replica(f"SERVE_REPLICA_manta-gateway-{name}") for name in "bca")

    def answers() -> set[tuple[int, str]]:
        return {front.ask("/v1/completions", "POST") for _ in range(8)}

    front.serve([first, second])
    assert answers() == {(200, first.name)}
    first.shutdown()
    first.server_close()
    assert answers() == {(200, second.name)}, "no request is refused meanwhile"
    front.start([third, second])
    assert answers() == {(200, second.name)}
    second.status = 425  # it drains
    assert answers() == {(200, third.name)}
    second.status = 200
    second.shutdown()  # it accepts connections, and answers nothing, as if stopped
    wait_until(lambda: front.ask("/v1/completions", "POST") == (200, third.name))
    assert answers() == {(200, third.name)}
    third.shutdown()


SETTINGS, HEADERS, DATA, END = 4, 1, 0, 5  # END: of headers and stream


def test_http2_is_spoken_without_tls_and_a_stream_is_answered_as_a_request(
    front: HAProxyFront, replicas: list[Replica]
) -> None:
    """With prior knowledge, as `curl --http2-prior-knowledge`; frames as in RFC 9113, headers in RFC 7541."""

    def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
        return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body

    front.serve(replicas)
    path, authority = b"/v1/models", b"x"
    get = b"\x82\x86" + bytes([0x44, len(path)]) + path + bytes([0x41, len(authority)]) + authority
    head = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)
    answers: dict[int, list[tuple[int, bytes]]] = {1: [], 3: []}
    with front.send(head + b"".join(frame(HEADERS, END, each, get) for each in answers)) as connection:
        received = connection.makefile("rb")
        while any(not each or each[-1][0] != DATA for each in answers.values()):
            length, kind = int.from_bytes(received.read(3)), received.read(1)[0]
            stream = int.from_bytes(received.read(5)[1:])
            body = received.read(length)
            if stream:
                answers[stream].append((kind, body))
    for (first, fields), *rest in answers.values():
        assert first == HEADERS and fields[0] == 0x88, "status 200"
        assert b"".join(body for _, body in rest) in (b"a", b"b")


def final_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The answer on a connection, which must be closed afterwards."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    body = response.read()
    assert connection.recv(1) == b""
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, body


def test_incomplete_requests_are_closed_and_delay_no_others(replicas: list[Replica]) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
    with closing(HAProxyFront(HAProxyFolder(), head_time_s=1)) as front:
        front.serve(replicas)
        heads, half = ([front.send(sent) for _ in range(75)] for sent in (head, head + b"\r\n{"))
        for path in ("/health", "/v1/models"):
            assert front.ask(path)[0] == 200
        assert {final_answer(connection)[0] for connection in heads} == {408}
        for status, headers, body in map(final_answer, half):
            assert status == 408 and json.loads(body)["error"]["code"] == 408
            assert headers["content-type"] == "application/json" and headers["x-request-id"]
        assert not any(replica.asked for replica in replicas)


@pytest.mark.parametrize("status", UNFINISHED)
def test_a_request_refused_before_its_body_is_answered_and_its_connection_closed(
    front: HAProxyFront, replicas: list[Replica], status: int
) -> None:
    front.serve(replicas[:1])
    replicas[0].reads, replicas[0].status = False, status
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 31000000\r\n\r\n"
    with front.send(request + b"x" * 200_000) as connection:
        answer = b""
        while piece := connection.recv(65536):  # raises TimeoutError where the connection stays open
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and body == b"a", "in the replica's words"
    assert b"x-request-id: " in head and (b"retry-after: 1" in head.lower()) == (status == 503)
    assert UNFINISHED_HEADER.encode() not in head.lower()


def test_a_request_under_which_a_replica_died_is_not_sent_to_another(
    front: HAProxyFront, replicas: list[Replica]
) -> None:
    front.serve(replicas)
    for replica in replicas:
        replica.status = 0  # dies before it answers
    for path in ("/v1/completions", "/v1/batches", "/tokenize"):
        before = sum(replica.asked for replica in replicas)
        status, body = front.ask(path, "POST")
        assert status == 503 and json.loads(body)["error"]["code"] == 503
        assert sum(replica.asked for replica in replicas) == before + 1


def kept_alive(connection: socket.socket) -> bool:
    """Return whether a connection that requests a probe may send another request."""
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return not response.will_close


def test_idle_connections_do_not_block_other_clients(replicas: list[Replica]) -> None:
    """One address has 30 of 40 connections."""
    probes = free_port()
    limits = {MOST: "40", PER_SOURCE: "30", PROBE_PORT: str(probes)}

    def idle(source: str) -> socket.socket:
        address = ("127.0.0.1", front.port)
        return socket.create_connection(address, timeout=600, source_address=(source, 0))

    def try_idle(source: str) -> None:
        # A connection above the limit is reset, which connect() may already report.
        with suppress(ConnectionResetError):
            held.append(idle(source))

    with closing(HAProxyFront(HAProxyFolder(), head_time_s=600, environment=limits)) as front:
        front.serve(replicas)
        held = [idle("127.0.0.2") for _ in range(20)]
        assert all(kept_alive(connection) for connection in held[:10])
        for _ in range(30):  # more than one address has
            try_idle("127.0.0.2")
        held += [idle("127.0.0.3") for _ in range(9)]
        status, body = front.ask("/v1/models")  # the 40th
        assert status == 200
        for _ in range(10):
            try_idle("127.0.0.3")
        status, body = front.ask("/v1/models")
        assert status == 503 and "connections" in json.loads(body)["error"]["message"]
        for path in ("/health", "/metrics"):
            assert front.ask(path)[0] == front.ask(path, port=probes)[0] == 200
        assert front.ask("/v1/models", port=probes)[0] == 404
        with idle("127.0.0.4") as connection:
            assert not kept_alive(connection), "where more than half are in use"
        for connection in held:
            connection.close()
        wait_until(lambda: front.ask("/v1/models")[0] == 200)


def test_a_connection_without_a_request_is_closed(replicas: list[Replica]) -> None:
    with closing(HAProxyFront(HAProxyFolder(), head_time_s=1)) as front:
        front.serve(replicas)
        with socket.create_connection(("127.0.0.1", front.port), timeout=600) as connection:
            while connection.recv(4096):
                pass


def test_the_number_of_connections_follows_the_open_file_limit() -> None:
    for files in (64, 256, 1024, 20_000, 1 << 20):
        limits = Connections.of(files, {})
        assert (1 <= limits.per_source <= limits.most and 2 * limits.total < files) or files == 64
    assert Connections.of(1 << 20, {}).most == 8192
    assert Connections.of(1 << 20, {MOST: "100", PER_SOURCE: "7"}) == Connections(100, 7, 64)
    for wrong in ("0", "-1", "many", "1e3"):
        with pytest.raises(ConfigError, match=PER_SOURCE):
            Connections.of(1024, {PER_SOURCE: wrong})


def test_a_request_has_one_id_whichever_process_answers(front: HAProxyFront, replicas: list[Replica]) -> None:
    def id_of(requested: str) -> str:
        head = f"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: {requested}\r\n\r\n"
        return final_answer(front.send(head.encode()))[1]["x-request-id"]

    front.start([])
    assert id_of("mine") == "mine"  # HAProxy
    front.serve(replicas)
    assert id_of("mine") == "mine"  # a replica that says none
    for wrong in ("m" * 5000, "a b", "\x07"):
        assert len(id_of(wrong)) == 36


def test_haproxys_own_errors_have_openais_form(front: HAProxyFront, replicas: list[Replica]) -> None:
    front.serve(replicas[:1])
    replicas[0].status = 400  # as an HTTP server says it, in plain text
    status, body = front.ask("/v1/models")
    assert status == 400 and json.loads(body)["error"]["type"] == "BadRequestError"
    replicas[0].status = 0
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\nConnection: close\r\n\r\n"
    status, headers, body = final_answer(front.send(head))
    assert status == 503 and headers["retry-after"] and headers["x-request-id"] == "mine"
    assert json.loads(body)["error"]["type"] == "ServiceUnavailableError"


def open_files(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            yield os.readlink(link)  # noqa: PTH115


def test_everything_listens_on_loopback_and_is_private(front: HAProxyFront, replicas: list[Replica]) -> None:
    front.serve(replicas)
    links = list(open_files(front.haproxy_pid()))
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = {row[1] for row in listening if row[3] == "0A" and row[9] in inodes}
    assert len(addresses) == 3 and all(address.startswith("0100007F:") for address in addresses)
    assert front.folder.path.stat().st_mode & 0o777 == 0o700
    for name in ("admin.sock", "own.sock", "scrape.sock"):
        assert (front.folder.path / "node" / name).stat().st_mode & 0o777 == 0o600


def test_files_of_a_killed_server_are_removed() -> None:
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]);"
        "from support.servers.haproxy_front import HAProxyFolder, HAProxyFront;"
        "front = HAProxyFront(HAProxyFolder()); front.start([]);"
        "print(front.folder.path, front.haproxy_pid(), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(TESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        folder, pid = server.stdout.readline().split()
        server.kill()
    try:
        wait_until(lambda: not Path(folder).exists() and not Path(f"/proc/{pid}").exists())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_next_start_removes_folders_of_killed_servers() -> None:
    script = (
        "import time; from manta.actors.haproxy.run_dir import HAProxyFolder;"
        "folder = HAProxyFolder(); print(folder.path, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None and living.stdout is not None
        dead, alive = (Path(reported.readline().strip()) for reported in (killed.stdout, living.stdout))
        killed.kill()
        killed.wait()
        assert dead.is_dir()
        HAProxyFolder().remove()
        assert not dead.exists() and (alive / "haproxy").is_file()
        living.kill()
    HAProxyFolder().remove()
    assert not alive.exists()


def test_a_configuration_unlike_serves_is_refused(tmp_path: Path) -> None:
    places = HAProxyPaths(tmp_path, tmp_path, tmp_path, tmp_path)
    with pytest.raises(ValueError, match="stats socket"):
        rewritten("global\n", places, Connections(1, 1, 1))


def test_joined_metrics_have_each_family_once_and_no_series_twice() -> None:
    texts = [
        f'# HELP t_total A b.\n# TYPE t_total counter\nt_total{{replica="{name}"}} {value}\n'
        f'# HELP g C.\n# TYPE g gauge\ng{{replica="{name}",le="a b"}} 1.0\n'
        for name, value in (("a", 3.0), ("b", 5.0), ("a", 4.0))
    ]
    families = {family.name: family for family in text_string_to_metric_families(joined(texts))}
    assert [(s.labels["replica"], s.value) for s in families["t"].samples] == [("a", 3.0), ("b", 5.0)]
    assert len(families["g"].samples) == 2


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (8, "2"), (64, "4")])
def test_haproxy_has_few_threads_on_few_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: str
) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_NBTHREAD", raising=False)
    monkeypatch.setattr(serve_environment, "owned_cores", lambda: cores)
    environment = serve_environment.ServeEnvironment(plain_proxy=False)
    try:
        assert os.environ["RAY_SERVE_HAPROXY_NBTHREAD"] == threads
    finally:
        environment.restore()
    assert "RAY_SERVE_HAPROXY_NBTHREAD" not in os.environ
