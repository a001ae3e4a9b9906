"""`benchmarks compare`: the same tokens from all contenders, the fastest variant of each, server requests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from benchmarks.cli import main
from benchmarks.comparison.compare import CompareOptions, run_compare
from benchmarks.comparison.contender_server import OpenAIServer
from benchmarks.comparison.contenders import HuggingFaceGenerate, TransformersTarget
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError, DatasetError
from support.checkpoints.text_pair import LiveServer

PROMPTS = [[5, 9, 200], [7], [31, 8, 12, 99, 140, 3]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{"id": str(i), "prompt": f"def f{i}(" + "x" * i} for i in range(4)]
    rows.append({"id": "chat", "messages": [{"role": "user", "content": "hi"}]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(pair: tuple[Path, Path], *, speculate: bool = True) -> EngineConfig:
    spec = {"model": str(pair[1]), "adaptive": False} if speculate else None  # some draft is verified
    settings = {"model": str(pair[0]), "speculative_config": spec, "num_threads": 1, "max_model_len": 256}
    return EngineConfig.from_dict({**settings, "dtype": "float32"})


class Served(ThreadingHTTPServer):
    """A small server with scripted answers: `answer(path, body)` returns status and JSON."""

    def __init__(self, answer: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Served
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: Any) -> None:
        status, answer = self.server.answer(self.path, body)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(answer: Any) -> Iterator[Served]:
    with Served(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=10)
            assert not thread.is_alive()


@pytest.mark.slow
def test_all_contenders_give_the_same_tokens_and_are_compared_with_dflash(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "compare.json"
    with LiveServer(config(pair), ServerSettings(served_model_name="tiny")) as server:
        options = CompareOptions(
            prompts=prompts,
            num_prompts=3,
            concurrency=(1, 3),
            rounds=2,
            max_tokens=6,
            server=server.url,
            output=output,
        )
        run_compare(config(pair), options)
    figures = json.loads(output.read_text())
    assert {"command", "cpu", "cores", "versions", "git_sha"} <= set(figures["provenance"])
    assert [point["requests"] for point in figures["points"]] == [1, 3]
    for point in figures["points"]:
        first, *others = point["contenders"]
        names = [side["name"] for side in others]
        assert first["name"] == "Manta, DFlash" and first["ratio"] == 1.0
        assert names[:3] == ["Manta, plain", "Hugging Face generate", "unbatched DFlash loop"]
        assert names[3].startswith("tiny at 127.0.0.1")
        for side in (first, *others):
            assert side["tokens"] == point["tokens"] == 3 * 6
            assert side["identical"] is True and side["identical_prompts"] == 3
            assert len(side["rounds_tokens_per_s"]) == 2
            both = zip(first["rounds_tokens_per_s"], side["rounds_tokens_per_s"], strict=True)
            assert side["ratio"] == pytest.approx(median(ours / theirs for ours, theirs in both), rel=1e-2)
        assert first["mean_acceptance_length"] >= 1.0
        assert others[0]["mean_acceptance_length"] is None
        assert point["turns"] >= 1 and point["idleness"]["seconds"] > 0
    said = capsys.readouterr()
    assert "3 request(s), 3 prompts" in said.out and said.out.count("yes") == 10
    assert said.err.count("round 2/2") == 2


def test_the_fastest_variant_of_the_trial_is_measured(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "compare.json"
    run_compare(
        config(pair),
        CompareOptions(
            prompts=prompts, num_prompts=2, concurrency=(2,), rounds=1, max_tokens=4, output=output
        ),
    )
    sides = json.loads(output.read_text())["points"][0]["contenders"]
    for side in sides:
        fastest = max(side["trial_tokens_per_s"], key=side["trial_tokens_per_s"].get)
        together = "one by one" if side["at_once"] == 1 else f"{side['at_once']} at once"
        assert fastest == ", ".join(filter(None, (side["dtype"], side["detail"], together)))
    by_name = {side["name"]: side for side in sides}
    assert len(by_name["Hugging Face generate"]["trial_tokens_per_s"]) == 4, "no static caches on a CPU"


def test_every_variant_of_generate_gives_the_same_tokens(pair: tuple[Path, Path]) -> None:
    generate = HuggingFaceGenerate(TransformersTarget(pair[0], torch.device("cpu")), ["float32"])
    reference = generate.reference(PROMPTS, 12)
    assert [len(answer) for answer in reference] == [12] * 3
    for setup, run in generate.setups(2).items():
        assert run(PROMPTS, 12).token_ids == reference, str(setup)


def test_generate_continues_after_an_end_of_sequence(pair: tuple[Path, Path], tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    expected = HuggingFaceGenerate(TransformersTarget(pair[0], cpu), ["float32"]).reference(PROMPTS, 12)
    ending = tmp_path / "ending"
    ending.mkdir()
    for file in pair[0].iterdir():
        (ending / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((ending / name).read_text())
        (ending / name).write_text(json.dumps(raw | {"eos_token_id": expected[0][3]}))
    generate = HuggingFaceGenerate(TransformersTarget(ending, cpu), ["float32"])
    assert generate.reference(PROMPTS, 12) == expected


def test_a_server_that_refuses_extra_fields_and_returns_no_token_ids_is_measured() -> None:
    requested: list[dict[str, Any]] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if body is None:
            return 200, {"data": [{"id": "first"}, {"id": "second"}]}
        if "ignore_eos" in body:
            return 400, {"error": {"message": "Unknown field ignore_eos."}}
        requested.append(body)
        return 200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": len(body["prompt"])}}

    with serving(answer) as served:
        server = OpenAIServer(f"{served.url}/v1/")
        ((setup, run),) = server.setups(2).items()
        found = run(PROMPTS, 6)
    assert server.name.startswith("first at ") and setup.dtype is None and setup.at_once == 2
    assert found.tokens == sum(map(len, PROMPTS)) and found.token_ids is None
    assert sorted(body["prompt"] for body in requested[1:]) == sorted(PROMPTS)
    assert all(body["max_tokens"] == 6 and body["temperature"] == 0 for body in requested[1:])


def test_a_server_gets_the_requested_number_of_concurrent_requests() -> None:
    together = threading.Barrier(3)

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if body is None:
            return 200, {"data": [{"id": "m"}]}
        if body["max_tokens"] > 1:
            together.wait(timeout=20)
        return 200, {"choices": [{"token_ids": body["prompt"]}], "usage": {"completion_tokens": 1}}

    with serving(answer) as served:
        (run,) = OpenAIServer(served.url).setups(3).values()
        assert run(PROMPTS, 2).token_ids == PROMPTS, "answers keep their prompts' places"


def test_a_server_that_cannot_be_measured_is_named_before_anything_loads(prompts: Path) -> None:
    nowhere = EngineConfig.from_dict({"model": "nowhere", "speculative_config": {"model": "nowhere"}})
    with socket.create_server(("127.0.0.1", 0)) as closed:
        unused = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"server={unused} cannot be reached.*Start it first") as refused:
        run_compare(nowhere, CompareOptions(prompts=prompts, server=unused))
    assert refused.value.param == "server"
    with pytest.raises(ConfigError, match="is not a URL like"):
        OpenAIServer("ftp://x")
    with serving(lambda path, body: (404, b"<html>not here</html>")) as served:
        with pytest.raises(ConfigError, match=r"lists no model.*--server-model"):
            OpenAIServer(served.url)
        with pytest.raises(ConfigError, match="not here") as unknown:
            OpenAIServer(served.url, "m")
    assert unknown.value.param == "server_model"


def test_wrong_options_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config is missing.*--spec-model"):
        run_compare(config(pair, speculate=False), CompareOptions())
    with pytest.raises(DatasetError, match=r"nowhere.jsonl does not exist.*--prompts"):
        run_compare(config(pair), CompareOptions(prompts=tmp_path / "nowhere.jsonl"))
    (tmp_path / "rows.jsonl").write_text('{"question": "why"}\n')
    with pytest.raises(DatasetError, match=r"neither `prompt` nor `messages`; it has: question"):
        run_compare(config(pair), CompareOptions(prompts=tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"server_model='m'.*--server, too"):
        CompareOptions(server_model="m")
    with pytest.raises(ConfigError, match="rounds=0"):
        CompareOptions(rounds=0)
    with pytest.raises(SystemExit, match="speculative_config is missing"):
        main(["compare", "m"])
