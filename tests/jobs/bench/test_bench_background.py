"""A short `benchmarks background`: the same requests alone and during a real batch."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.arrivals import Arrivals
from benchmarks.serving.background import BackgroundOptions, measure, print_points
from benchmarks.serving.http_load import find_server, pass_figures, send
from manta.actors.http.config.settings_mapping import split_settings
from manta.actors.tokenization.prompts import Chat
from manta.cluster.errors import ConfigError, MantaError
from manta.jobs.bench.common.engine_passes import PromptRow
from manta.jobs.bench.common.request_source import RequestSource
from manta.jobs.common.http_client import ServerClient
from support.checkpoints.text_pair import LiveServer, make_text_pair


def test_client_counts_equal_server_counts_and_every_failure_has_a_kind(tmp_path: Path) -> None:
    rows = [PromptRow(str(i), "code", f"def f{i}(") for i in range(4)]
    rows += [PromptRow("chat", "talk", Chat([{"role": "user", "content": "hi"}]))]
    requests = [RequestSource(rows, 8, 0.0)[number] for number in range(10)]
    args = {"model": str(make_text_pair(tmp_path / "pair")[0]), "max_model_len": 256, "num_threads": 1}
    with LiveServer(*split_settings({**args, "dtype": "float32", "device": "cpu"})) as server:
        target = find_server(server.url)
        before = server.engine.stats()
        done = pass_figures(asyncio.run(send(target, requests, Arrivals(1e3), 2, timeout_s=60.0)))
        after = server.engine.stats()
        too_long = [RequestSource(rows, 100_000, 0.0)[0]]
        refused = pass_figures(asyncio.run(send(target, too_long, Arrivals(9.0), None, timeout_s=60.0)))
        late = pass_figures(asyncio.run(send(target, requests[:1], Arrivals(9.0), 1, timeout_s=1e-3)))
    assert done["completed"] == 10 and not done["failures"]
    assert done["tokens"] == sum(request.max_tokens for request in requests)
    assert done["tokens"] == after.generation_tokens - before.generation_tokens, "the engine counted as many"
    assert done["prompt_tokens"] == after.prompt_tokens - before.prompt_tokens
    assert done["ttft_ms"]["count"] == 10 and done["ttft_ms"]["p50"] <= done["e2el_ms"]["p50"]
    assert refused["failures"] == {"refused, status 400": 1} and late["failures"] == {"late": 1}
    with pytest.raises(MantaError, match="cannot be reached"):
        find_server("http://127.0.0.1:9")


@pytest.mark.slow
def test_a_batch_runs_during_one_sides_turns_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage, prompts = tmp_path / "batches", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": f"def f{i}("}) + "\n" for i in range(5)))
    options = BackgroundOptions(
        prompts=prompts, rates=(40.0,), num_requests=12, lines=1000, rounds=1, max_tokens=16
    )
    args = {
        "model": str(make_text_pair(tmp_path / "pair")[0]),
        "batch_storage": str(storage),
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_model_len": 256,
    }
    with LiveServer(*split_settings(args)) as server:
        (point,) = measure(server.url, storage, options, None)
        alone, beside = point["sides"]
        for side in (alone, beside):
            assert side["completed"] == 12 and not side["failures"]
        assert alone["tokens"] == beside["tokens"], "the same requests"
        assert abs(alone["batch_tokens_per_s"]) < 1.0 < beside["batch_tokens_per_s"]
        assert set(point["ratios"]) == {"tpot_p50", "tpot_p95", "ttft_p50", "ttft_p95"}
        with ServerClient(server.url) as client:
            batches = client.get_json("/v1/batches")["data"]
            assert [batch["status"] for batch in batches] == ["cancelled"]
            few = replace(options, lines=2)
            with pytest.raises(MantaError, match="Give it more --lines"):
                measure(server.url, storage, few, None)
    print_points([point])
    assert "p95 time per token with a batch" in capsys.readouterr().out


def test_options_without_anything_to_measure_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lines=0"):
        BackgroundOptions(lines=0)
    with pytest.raises(ConfigError, match="request_rate=0"):
        BackgroundOptions(rates=(0.0,))
