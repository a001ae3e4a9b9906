"""/v1/files and /v1/batches with the OpenAI client: every line is answered once, whatever is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pyarrow as pa
import pytest
from manta.actors.batch.dataset import text_records
from manta.actors.batch.openai import batch_store
from manta.actors.engine.uniproc_executor import make_executor
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError, EngineDeadError
from manta.cluster.step.scheduler_output import SchedulerOutput
from openai.types import Batch
from support.checkpoints.text_pair import LiveServer
from support.engines.passing_executor import PassingExecutor
from support.engines.pausable_executor import PausableExecutors
from support.jobs.s3_outputs import make_bucket, s3_server, s3_url
from support.paths import module_command
from support.servers.server_probes import Serve, openai_client
from support.waiting import WAIT_S, wait_until

NAME = "tiny"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def executors() -> PausableExecutors:
    return PausableExecutors()


@pytest.fixture(scope="module")
def server(
    serve: Serve, executors: PausableExecutors, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    limits = {"max_request_bytes": 20_000, "max_batch_file_bytes": 2_000_000, "max_batch_lines": 300}
    with serve(executors.make, batch_storage=str(tmp_path_factory.mktemp("batches")), **limits) as server:
        yield server


def line(custom_id: str, prompt: str = "Say something.", url: str = CHAT, **body: Any) -> dict[str, Any]:
    requested = {"messages": [{"role": "user", "content": prompt}]} if url == CHAT else {"prompt": prompt}
    body = {"model": NAME, "temperature": 0, "max_tokens": 12, **requested, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


def submit(client: openai.OpenAI, content: bytes | Sequence[Any], endpoint: str = CHAT, **more: Any) -> Batch:
    content = content if isinstance(content, bytes) else jsonl(content)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    more = {"completion_window": "24h", **more}
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **more)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """Return the batch at its end."""
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of an output or error file by custom_id, each once."""
    lines = client.files.content(file_id).text.splitlines() if file_id else []
    found = {each["custom_id"]: each for each in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def texts(found: dict[str, Any]) -> dict[str, str]:
    choices = {name: each["response"]["body"]["choices"][0] for name, each in found.items()}
    return {name: choice.get("text") or choice["message"]["content"] for name, choice in choices.items()}


def test_files_are_uploaded_read_and_deleted(client: openai.OpenAI) -> None:
    content = jsonl([line(f"row-{i}", "x" * 5000) for i in range(300)])
    assert len(content) > 1_500_000, "larger than a request may be, and than what waits in memory"
    first = client.files.create(file=("first.jsonl", content), purpose="batch")
    assert first.id.startswith("file-") and first.bytes == len(content) and first.filename == "first.jsonl"
    second = client.files.create(file=("second.jsonl", b""), purpose="batch")
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).read() == content
    assert client.files.content(second.id).read() == b""
    mine = [
        file.id for file in client.files.list(purpose="batch", limit=1) if file.id in (first.id, second.id)
    ]
    assert mine == [second.id, first.id], "newest first, over several pages"
    oldest = client.files.list(purpose="batch", order="asc", limit=1)
    assert oldest.has_more and oldest.data[0].created_at <= first.created_at
    assert client.files.delete(first.id).deleted
    for gone in (first.id, "file-../../etc/passwd", "file-", "x"):
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(gone)


def test_unusable_uploads_are_refused(http: httpx.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        after = {"anchor": "created_at", "seconds": 3600}
        client.files.create(file=("x.jsonl", b"{}"), purpose="batch", expires_after=after)
    with pytest.raises(openai.APIStatusError, match="max_batch_file_bytes") as caught:
        client.files.create(file=("x.jsonl", b"x" * 2_100_000), purpose="batch")
    assert caught.value.status_code == 413
    assert http.post("/v1/files", json={}).json()["error"]["param"] == "file"
    with pytest.raises(openai.BadRequestError, match="after"):
        client.files.list(after="file-unknown")


def test_a_batch_answers_each_line_as_http_does(http: httpx.Client, client: openai.OpenAI) -> None:
    prompts = [f"# a beginning that all rows have in common\ndef f{i}(" for i in range(12)]
    lines = [line(f"row-{i}", prompt, COMPLETIONS) for i, prompt in enumerate(prompts)]
    lines += [line("bad", "x", COMPLETIONS, temperature=-1), line("long", "x" * 8000, COMPLETIONS)]
    batch = submit(client, lines, COMPLETIONS, metadata={"for": "a test"})
    assert batch.id.startswith("batch_") and batch.object == "batch" and batch.status == "validating"
    assert batch.expires_at == batch.created_at + 86400 and batch.metadata == {"for": "a test"}
    batch = ended(client, batch)
    assert batch.status == "completed" and batch.model == NAME and batch.errors is None
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (14, 12, 2)
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    assert not (batch.failed_at or batch.expired_at or batch.cancelling_at or batch.cancelled_at)
    assert batch.usage is not None and batch.usage.output_tokens == 12 * 12
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens

    metrics = http.get("/metrics").text
    assert 'status="failed"} 2.0' in metrics and 'status="completed"} 12.0' in metrics

    found = results(client, batch.output_file_id)
    whole = client.completions.create(model=NAME, prompt=prompts[3], temperature=0, max_tokens=12)
    assert texts(found)["row-3"] == whole.choices[0].text
    response = found["row-3"]["response"]
    assert response["status_code"] == 200 and found["row-3"]["id"].startswith("batch_req_")
    assert response["body"]["model"] == NAME and response["body"]["usage"]["completion_tokens"] == 12
    usages = [one["response"]["body"]["usage"] for one in found.values()]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert batch.usage.input_tokens_details.cached_tokens == cached > 0
    errors = results(client, batch.error_file_id)
    assert set(errors) == {"bad", "long"} and len(found) == 12
    for name, requested in (("bad", lines[-2]), ("long", lines[-1])):
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(**requested["body"])
        said = errors[name].pop("response")
        assert errors[name].keys() == {"id", "custom_id", "error"} and errors[name]["error"] is None
        assert (said["status_code"], said["body"]["error"]) == (refused.value.status_code, refused.value.body)
    file = client.files.retrieve(batch.output_file_id or "")
    assert file.purpose == "batch_output" and file.bytes == len(client.files.content(file.id).read())


def test_a_wrong_file_fails_its_batch_with_its_lines(client: openai.OpenAI) -> None:
    good = line("a")
    wrong = [
        ("invalid_json_line", b'{"custom_id": \n'),
        ("invalid_json_line", b"[1]\n"),
        ("duplicate_custom_id", jsonl([good])),
        ("missing_required_parameter", jsonl([{**good, "custom_id": None}])),
        ("missing_required_parameter", jsonl([{**line("b"), "body": 1}])),
        ("mismatched_endpoint", jsonl([line("c", url=COMPLETIONS)])),
        ("invalid_method", jsonl([{**line("d"), "method": "GET"}])),
        ("model_not_found", jsonl([line("e", model="other")])),
    ]
    batch = ended(client, submit(client, jsonl([good]) + b"\n" + b"".join(each for _, each in wrong)))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors is not None and batch.errors.data is not None
    codes = [(error.code, error.line) for error in batch.errors.data]
    assert codes == [(code, number) for number, (code, _) in enumerate(wrong, 3)]
    for content, code in (
        (b"\n", "empty_file"),
        (jsonl([line(str(i)) for i in range(301)]), "too_many_requests"),
    ):
        batch = ended(client, submit(client, content))
        assert batch.errors is not None and batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == [code]


def test_an_unusable_file_is_named_by_its_id_and_not_by_its_path(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_records, "MAX_LINE_BYTES", 1000)
    batch = ended(client, submit(client, b" " * 2000 + b"\n" + jsonl([line("a")])))
    assert batch.errors is not None and batch.errors.data is not None
    (error,) = batch.errors.data
    assert (batch.status, error.code) == ("failed", "input_file_unusable")
    assert error.message == f"input: {batch.input_file_id}, line 1: a line has more than 0 MiB."


def test_invalid_batch_requests_are_refused(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
    requested: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for wrong, status, named in (
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"input_file_id": "file-unknown"}, 404, "file_id"),
        ({"metadata": {"x" * 65: "y"}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, "output_expires_after"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            client.batches.create(**{**requested, **wrong})
        assert caught.value.status_code == status and named in (caught.value.param or "")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_unknown")


def test_batches_are_listed_newest_first(client: openai.OpenAI) -> None:
    made = [submit(client, [line("a", max_tokens=1)]) for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [made[2].id, made[1].id] and page.has_more
    after = client.batches.list(limit=1, after=made[1].id)
    assert after.data[0].id == made[0].id
    assert {batch.id for batch in client.batches.list(limit=2)} >= {batch.id for batch in made}
    done = [ended(client, batch) for batch in made]
    assert [batch.status for batch in done] == ["completed"] * 3
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(done[0].id)


def lines_of_two_lengths(num: int) -> list[dict[str, Any]]:
    """Four lines that end early, and many that do not end while the executor runs few steps."""
    lengths = [1] * 4 + [200] * (num - 4)
    return [line(f"row-{i}", f"say {i}", max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]


FEW_STEPS = 30


def num_completed(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return 0 if counts is None else counts.completed


def test_finished_lines_of_a_cancelled_batch_are_kept(
    client: openai.OpenAI, executors: PausableExecutors
) -> None:
    with executors[0].paused_after(FEW_STEPS):
        batch = submit(client, lines_of_two_lengths(300))
        input_id = batch.input_file_id
        wait_until(lambda: num_completed(client, batch) > 0)
        with pytest.raises(openai.BadRequestError, match="input of"):
            client.files.delete(input_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    check_cut(client, batch, "batch_cancelled")
    assert client.files.delete(input_id).deleted


def test_finished_lines_of_an_expired_batch_are_kept(
    client: openai.OpenAI, executors: PausableExecutors, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executors[0].paused_after(FEW_STEPS):
        with monkeypatch.context() as patch:  # early, until a line is answered
            patch.setattr(batch_store.Batch, "is_late", property(lambda _: False))
            batch = submit(client, lines_of_two_lengths(300), completion_window="1s")
            wait_until(lambda: num_completed(client, batch) > 0)
        wait_until(lambda: time.time() > batch.expires_at)
    batch = ended(client, batch)
    assert batch.status == "expired" and batch.expired_at and batch.expires_at
    assert batch.expired_at >= batch.expires_at
    check_cut(client, batch, "batch_expired")


def check_cut(client: openai.OpenAI, batch: Batch, code: str) -> None:
    """Check that each line is there once: some answered, the others with the reason."""
    found, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert found and errors and not set(found) & set(errors)
    assert set(found) | set(errors) == {f"row-{i}" for i in range(300)}
    assert {each["error"]["code"] for each in errors.values()} == {code}
    assert all(each["error"].keys() == {"code", "message"} for each in errors.values())
    assert {each["response"] for each in errors.values()} == {None}
    assert len(texts(found)) == len(found)
    counts = batch.request_counts
    assert counts is not None and (counts.completed, counts.failed) == (len(found), len(errors))


def test_replicas_share_batches_and_each_line_is_answered_once(serve: Serve, tmp_path: Path) -> None:
    with serve(batch_storage=str(tmp_path)) as one, serve(batch_storage=str(tmp_path)) as other:
        clients = [openai_client(one.url), openai_client(other.url)]
        lines = [line(f"row-{i}", f"say {i}", max_tokens=20) for i in range(12)]
        batches = [submit(clients[i % 2], lines) for i in range(3)]
        done = [ended(clients[0], batch) for batch in batches]
        assert [batch.status for batch in done] == ["completed"] * 3
        reported = [results(clients[1], batch.output_file_id) for batch in done]
        ids = [(each["id"], each["response"]["body"]["id"]) for lines in reported for each in lines.values()]
        assert len({id for both in ids for id in both}) == 2 * 12 * 3, "of three batches"
        answers = [texts(each) for each in reported]
        assert len(answers[0]) == 12 and all(each == answers[0] for each in answers)
    jobs = [json.loads(path.read_text()) for path in tmp_path.glob("work/*/out/_manta/job.json")]
    assert [len(job["runs"]) for job in jobs] == [1] * 3, "nobody began what another had"


def test_files_and_batches_can_be_in_an_object_store(serve: Serve) -> None:
    with s3_server() as address:
        make_bucket(address, "batches")
        with serve(batch_storage=s3_url(address, "batches")) as server:
            client = openai_client(server.url)
            lines = [line(f"row-{i}", f"say {i} " + "x" * 2000) for i in range(600)]
            large = client.files.create(file=("large.jsonl", jsonl(lines)), purpose="batch")
            assert large.bytes > 2**20 and client.files.content(large.id).read() == jsonl(lines)
            assert client.files.delete(large.id).deleted
            batch = ended(client, submit(client, [line("a"), line("b"), line("bad", n=0)]))
            assert batch.status == "completed"
            assert set(results(client, batch.output_file_id)) == {"a", "b"}
            assert set(results(client, batch.error_file_id)) == {"bad"}
            assert [each.id for each in client.batches.list()] == [batch.id]
            assert len(client.files.list().data) == 3


def test_a_batch_of_another_model_fails(serve: Serve, engine_args: dict[str, Any], tmp_path: Path) -> None:
    storage, executors = str(tmp_path / "batches"), PausableExecutors()
    with serve(executors.make, batch_storage=storage) as server, executors[0].paused_after(FEW_STEPS):
        batch = submit(openai_client(server.url), lines_of_two_lengths(300))
        wait_until(lambda: any(tmp_path.glob("batches/work/*/out/_manta/pending/*/*.arrow")))
    other = shutil.copytree(engine_args["model"], tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = "Another one. " + settings["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    with serve(model=str(other), batch_storage=storage) as server:
        client = openai_client(server.url)
        batch = ended(client, batch)
        assert batch.status == "failed" and batch.failed_at
        assert batch.errors is not None and batch.errors.data is not None
        assert batch.errors.data[0].code == "settings_changed"
        assert "model" in (batch.errors.data[0].message or "")
        check_cut(client, batch, "batch_failed")


class DyingExecutor(PassingExecutor):
    """A real executor that dies when it computes a certain line."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(make_executor(config))

    def submit(self, plan: SchedulerOutput) -> None:
        if any(request.request_id.endswith("/poison") for request in plan.admitted):
            raise EngineDeadError("worker 1 (pid 4711) was killed by signal 9")
        super().submit(plan)


def test_a_line_that_kills_engines_is_found_and_all_others_are_answered(serve: Serve, tmp_path: Path) -> None:
    lines = [line(f"row-{i}", max_tokens=4) for i in range(11)]
    batch, deaths = None, 0
    while batch is None or batch.status != "completed":
        with serve(DyingExecutor, batch_storage=str(tmp_path), speculative_config=None) as server:
            client = openai_client(server.url)
            batch = batch or submit(client, [*lines[:7], line("poison", max_tokens=4), *lines[7:]])
            wait_until(partial(dead_or_done, client, batch))
            batch = client.batches.retrieve(batch.id)
            deaths += batch.status != "completed"
            if batch.status == "completed":
                found = results(client, batch.output_file_id)
                errors = results(client, batch.error_file_id)
    assert set(found) == {f"row-{i}" for i in range(11)} and 3 <= deaths <= 8
    assert set(errors) == {"poison"} and errors["poison"]["error"]["code"] == "engine_died"


def dead_or_done(client: openai.OpenAI, batch: Batch) -> bool:
    health = httpx.get(str(client.base_url.join("/health")), timeout=WAIT_S)
    return health.status_code == 503 or client.batches.retrieve(batch.id).status == "completed"


def test_without_a_storage_the_routes_name_the_missing_setting(serve: Serve) -> None:
    with serve() as server:
        client = openai_client(server.url)
        for ask in (client.files.list, client.batches.list):
            with pytest.raises(openai.APIStatusError, match="--batch-storage") as caught:
                ask()
            assert (
                caught.value.status_code == 501 and caught.value.response.headers["x-should-retry"] == "false"
            )
        with pytest.raises(openai.APIStatusError, match="--batch-storage"):
            client.files.create(file=("x.jsonl", b"{}"), purpose="batch")
    with pytest.raises(ConfigError, match="absolute"):
        ServerSettings(batch_storage="out/batches")


def test_a_killed_replicas_batch_is_continued_by_another(
    serve: Serve, engine_args: dict[str, Any], client: openai.OpenAI, tmp_path: Path
) -> None:
    lines = [line(f"row-{i}", f"say {i}", max_tokens=40, temperature=0.8) for i in range(80)]
    args = {**engine_args, "max_num_seqs": 4, "batch_storage": str(tmp_path)}
    # A step gives a sequence at most 16 tokens: after 60 steps some rows have ended, but not all.
    command = module_command("support.servers.served_process", [json.dumps(args), "60"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        try:
            batch = submit(openai_client(killed.stdout.readline().strip()), lines)
            wait_until(lambda: any(tmp_path.glob("work/*/out/_manta/pending/*/*.arrow")))
        finally:
            killed.kill()
    segments = tmp_path.glob("work/*/out/_manta/pending/*/*.arrow")
    num_kept = sum(pa.ipc.open_file(path).read_all().num_rows for path in segments)
    assert 0 < num_kept < 80, "some rows were durable"
    with serve(max_num_seqs=4, batch_storage=str(tmp_path)) as server:
        second = openai_client(server.url)
        batch = ended(second, batch)
        assert batch.status == "completed"
        found = results(second, batch.output_file_id)
        metrics = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
        assert f'status="completed"}} {80 - num_kept}.0' in metrics, "what was durable is not answered again"
    undisturbed = ended(client, submit(client, lines))
    assert texts(found) == texts(results(client, undisturbed.output_file_id))
    assert set(found) == {f"row-{i}" for i in range(80)}
