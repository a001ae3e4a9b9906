"""Captured traffic over real HTTP: what is captured, its format, size, privacy and losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from hypothesis import given, settings, strategies
from manta.actors.capture.collector import CapturedAnswers, open_capture
from manta.actors.capture.records import CapturedRecord, read_captured, segments
from manta.actors.capture.writer_process import NUM_SEGMENTS, SegmentRing, WriterSettings
from manta.actors.engine.outputs import NOT_RESUMED
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.config.settings_mapping import split_models
from manta.actors.tokenization.prompts import EncodedPrompt
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError, DatasetError
from manta.cluster.request.caller import Tenant
from manta.jobs.cli import app
from support.checkpoints.text_pair import LiveServer, tiny_settings
from support.servers.server_probes import http_client
from support.waiting import wait_until
from typer.testing import CliRunner

HOOK = """
def redact(record):
    if record["tenant"] == "private":
        return None
    if record["tenant"] == "broken":
        raise ValueError(record["prompt"])
    record["prompt"] = record["prompt"].replace("4111", "****")
    return record
"""
ASKED: dict[str, Any] = {"max_tokens": 8, "temperature": 0.7, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def make_server(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LiveServer]:
    (tmp_path / "company_privacy.py").write_text(HOOK)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**server: Any) -> LiveServer:
        engine = EngineConfig.from_dict(tiny_settings(pair, num_pages=128))
        return LiveServer(engine, ServerSettings(served_model_name="tiny", **server))

    return make


def counted(server: LiveServer) -> dict[str, int]:
    lines = httpx.get(f"{server.url}/metrics", timeout=600).text.splitlines()
    found = [line for line in lines if line.startswith("manta:captured_completions_total")]
    return {line.partition('result="')[2].partition('"')[0]: int(float(line.split()[-1])) for line in found}


def writers() -> list[int]:
    """Our own capture processes."""
    command = ["pgrep", "-P", str(os.getpid()), "-f", "manta.actors.capture.writer_process"]
    found = subprocess.run(command, capture_output=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def test_prompts_and_answers_are_captured_under_their_tenants(
    make_server: Callable[..., LiveServer], tmp_path: Path
) -> None:
    folder = tmp_path / "captured"
    with make_server(capture=str(folder)) as server, http_client(server.url) as http:
        headers = {"X-Tenant": "acme", "X-Category": "logs"}
        reported = http.post(
            "/v1/completions", json={**ASKED, "prompt": "import os", "n": 2}, headers=headers
        ).json()
        requested = {"messages": [{"role": "user", "content": "hello"}], "stream": True, **ASKED}
        chat = http.post("/v1/chat/completions", json={**requested, "metadata": {"category": "chat"}}).text
        http.post("/v1/completions", json={**ASKED, "prompt": "not this", "store": False})
        http.post(
            "/v1/completions", json={**ASKED, "prompt": "nor this"}, headers={"Cache-Control": "no-store"}
        )
        http.post("/v1/completions", json={**ASKED, "prompt": "echo", "echo": True, "max_tokens": 0})
        http.post("/v1/responses", json={"input": "nor this", "max_output_tokens": 4, "store": False})
        assert http.post("/v1/completions", json={**ASKED, "prompt": "x", "n": -1}).status_code == 400
        wait_until(lambda: counted(server)["kept"] == 3)
        (pid,) = writers()
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19, "a step never waits for it"
    assert writers() == [], "it ends with the server"
    records = list(read_captured(folder))
    first = {record.token_ids for record in records[:2]}
    assert first == {tuple(choice["token_ids"]) for choice in reported["choices"]}
    for record in records[:2]:
        assert record.prompt_token_ids == tuple(reported["choices"][0]["prompt_token_ids"])
        assert (record.model, record.tenant, record.category) == ("tiny", "acme", "logs")
    events = [json.loads(line[6:]) for line in chat.splitlines() if line.startswith("data: {")]
    chosen = [choice for event in events for choice in event["choices"]]
    assert records[2].token_ids == tuple(i for choice in chosen for i in choice.get("token_ids") or ())
    assert records[2].category == "chat" and len(records[2].token_ids) == 8
    assert time.strftime("%Y-%m", time.gmtime()) == records[2].day[:7]
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, "others must not read it"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_redaction_hook_decides_what_is_captured_and_a_failing_hook_captures_nothing(
    make_server: Callable[..., LiveServer],
    pair: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "captured"
    hook = "company_privacy:redact"
    with make_server(capture=str(folder), capture_redact=hook) as server:
        for tenant in ("private", "broken", "broken", "open"):
            body = {**ASKED, "prompt": f"the card 4111 of {tenant}", "metadata": {"tenant": tenant}}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).status_code == 200
        wait_until(lambda: sum(counted(server).values()) == 4)
        found = counted(server)
        assert (found["kept"], found["redacted"], found["failed"]) == (1, 1, 2)
        os.kill(writers()[0], signal.SIGKILL)
        wait_until(lambda: "starting another one" in caplog.text)
    assert caplog.text.count("ValueError in line") == 1, "said once, without what it was about"
    assert "4111" not in caplog.text.replace("****", "")
    (record,) = read_captured(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(pair[0] / "tokenizer.json"))
    assert tokenizer.decode(list(record.prompt_token_ids)) == "the card **** of open"
    assert len(record.token_ids) == 8, "what the hook left alone are the target's own tokens"


def test_prompts_may_be_omitted_and_nothing_is_captured_by_default(pair: tuple[Path, Path]) -> None:
    prompt, tenant = EncodedPrompt((1, 2)), Tenant(named="acme")
    answers = CapturedAnswers([prompt], "tiny", tenant, 0.5, {(0, 0): [3], (0, 1): [4, 5]})
    private, whole = (answers.records(prompts=prompts) for prompts in (False, True))
    assert [(each.prompt_token_ids, each.token_ids) for each in private] == [((), (3,)), ((), (4, 5))]
    assert {each.prompt_token_ids for each in whole} == {(1, 2)}
    assert (whole[0].tenant, whole[0].temperature) == ("acme", 0.5)
    config = EngineConfig(model=str(pair[0]))
    assert open_capture(config, ServerSettings(), lambda result: None) is None
    none = open_capture(config, ServerSettings(capture="/c", capture_fraction=0.0), lambda result: None)
    assert none is not None and none.choose([prompt], NOT_RESUMED, "tiny", tenant, 1.0) is None


def records_of(sizes: list[int]) -> list[CapturedRecord]:
    """Return records of equal size, distinguished by their first token."""
    return [
        CapturedRecord((), (number, *([7] * size)), "m", "2026-11-23") for number, size in enumerate(sizes)
    ]


@settings(max_examples=40, deadline=None)
@given(strategies.lists(strategies.tuples(strategies.integers(0, 400), strategies.booleans()), max_size=80))
def test_the_capture_folder_stays_within_its_limit_and_keeps_the_newest_records(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[int, bool]]
) -> None:
    """Segments of records, and of processes that died in the middle of a line."""
    folder, bound = tmp_path_factory.mktemp("ring") / "captured", 16 * 1024
    ring = SegmentRing(folder, bound)
    for record, (_, dies) in zip(records_of([size for size, _ in story]), story, strict=True):
        assert ring.append(record.line())
        assert sum(path.stat().st_size for path in segments(folder)) <= bound
        assert len(segments(folder)) <= NUM_SEGMENTS
        if dies:
            ring.close()
            with segments(folder)[-1].open("ab") as file:
                file.write(b'{"day": "20')
            ring = SegmentRing(folder, bound)
    ring.close()
    found = [record.token_ids[0] for record in read_captured(folder)] if story else []
    assert found == list(range(len(story)))[len(story) - len(found) :]
    assert len(found) >= min(len(story), 8), "most of the bound is used"


def test_two_writers_share_a_folder_and_its_limit(tmp_path: Path) -> None:
    folder, bound = tmp_path / "captured", 2**20
    lines = b"".join(record.line() for record in records_of([3000] * 120))
    command = [
        sys.executable,
        "-m",
        "manta.actors.capture.writer_process",
        WriterSettings(str(folder), bound).argument(),
    ]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    large = records_of([100_000])[0].line()
    reported = [each.communicate(lines + large, timeout=600)[0].decode() for each in both]
    for said in reported:
        assert said.split()[:121] == ["ready", *["kept"] * 120] and "too_large 200" in said
    kept = list(read_captured(folder))
    assert sum(path.stat().st_size for path in segments(folder)) <= bound
    assert len(kept) > 100 and all(len(record.token_ids) == 3001 for record in kept), "no line is torn"


def test_invalid_capture_settings_are_refused_before_a_server_starts(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    serve = ["serve", str(pair[0]), "--port", "0"]
    for flags, message in (
        (["--capture", str(open_to_all)], "chmod 700"),
        (["--capture", str(tmp_path / "c"), "--capture-redact", "no_such_module:redact"], "ModuleNotFound"),
        (["--capture", str(tmp_path / "c"), "--capture-redact", "redact"], "mymodule:redact"),
        (["--capture", str(tmp_path / "c"), "--capture-fraction", "2"], "capture_fraction=2.0"),
        (["--capture", str(tmp_path / "c"), "--capture-max-bytes", "1k"], "capture_max_bytes=1000"),
    ):
        error = CliRunner().invoke(app, [*serve, *flags]).exception
        assert isinstance(error, ConfigError) and message in error.message, error
    with pytest.raises(ConfigError, match="absolute"):
        ServerSettings(capture="captured")
    with pytest.raises(ConfigError, match="a separate folder"):
        split_models({"capture": "/c", "models": [{"model": "a"}, {"model": "b"}]})
    assert split_models({"models": [{"model": "a", "capture": "/c"}, {"model": "b"}]})[0][1].capture == "/c"


def test_lines_that_manta_did_not_write_are_named(tmp_path: Path) -> None:
    path = tmp_path / "captured-00000001.jsonl"
    path.write_bytes(records_of([1])[0].line() + b'{"token_ids": ["a"]}\n')
    with pytest.raises(DatasetError, match=r"captured-00000001.jsonl:2: .*prompt_token_ids is missing"):
        list(read_captured(tmp_path))
    with pytest.raises(DatasetError, match="--capture"):
        list(read_captured(tmp_path / "captured-00000002.jsonl"))
