"""Every metric of the catalogue, against a known load."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from manta.actors.http.config.settings import ServerSettings
from manta.actors.observability.engine_metrics import engine_values
from manta.actors.observability.telemetry import RequestTelemetry
from manta.cluster.config import EngineConfig
from manta.cluster.metrics.engine_metrics import CATALOGUE
from manta.cluster.metrics.metric import BoundedLabels
from manta.cluster.step.scheduler_output import DrafterUse
from prometheus_client.parser import text_string_to_metric_families
from support.checkpoints.text_pair import LiveServer, tiny_settings
from support.servers.server_probes import http_client
from support.servers.simulated_server import SURVIVAL, simulated
from support.waiting import wait_until

Json = dict[str, Any]
Samples = dict[str, float]


class Load:
    """The requests, the answers, and `/metrics` before and after."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.before = scraped(http)
        self.usages: list[Json] = []

    def post(self, path: str, body: Json, headers: dict[str, str] | None = None) -> httpx.Response:
        answer = self._http.post(path, json={"ignore_eos": True, **body}, headers=headers)
        if answer.status_code == 200 and "usage" in answer.text:
            lines = [line for line in answer.text.splitlines() if '"usage":{' in line]
            self.usages.append(json.loads(lines[-1].removeprefix("data: "))["usage"])
        return answer

    def end(self) -> None:
        self.after = scraped(self._http)

    def grown(self, name: str, **labels: str) -> float:
        """The sum over all samples of a name with these labels."""
        return sum(
            value - self.before.get(sample, 0.0)
            for sample, value in self.after.items()
            if sample.split("{")[0] == name and all(f'"{k}": "{v}"' in sample for k, v in labels.items())
        )

    def tokens(self, kind: str) -> int:
        return sum(usage[f"{kind}_tokens"] for usage in self.usages)


def scraped(http: httpx.Client) -> Samples:
    return {
        f"{sample.name}{json.dumps(sample.labels)}": sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    small = {"max_num_seqs": 4, "max_num_queued_reqs": 8, "num_pages": 24}
    config = EngineConfig.from_dict(tiny_settings(pair, **small))
    storage = str(tmp_path_factory.mktemp("batches"))
    anybody: dict[str, Any] = {"tenants": "*", "categories": "*", "max_metric_labels": 2}
    settings = ServerSettings(served_model_name="tiny", batch_storage=storage, **anybody)
    with LiveServer(config, settings, simulated) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with http_client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def load(http: httpx.Client) -> Load:
    """Six completions of five prompts, each shorter than a page; two refused requests."""
    load = Load(http)
    acme = {"X-Tenant": "acme"}
    load.post("/v1/completions", {"prompt": "ab", "n": 2, "max_tokens": 16}, acme)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    metadata = {"tenant": "body", "category": "coding"}
    load.post("/v1/completions", {"prompt": "cd", "max_tokens": 24, "metadata": metadata, **stream}, acme)
    chat = {"messages": [{"role": "user", "content": "e"}], "metadata": {"category": "coding"}}
    load.post("/v1/chat/completions", chat)
    load.post("/v1/completions", {"prompt": ["f", "gh"], "max_tokens": 8}, {"X-Tenant": "no tenant, {}"})
    assert load.post("/v1/completions", {"prompt": "x", "n": 13}).status_code == 503
    assert load.post("/v1/nothing", {}).status_code == 404
    load.end()
    assert len(load.usages) == 4
    return load


COMPLETIONS, PROMPTS = 6, 5
PER_COMPLETION = (
    "time_to_first_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_generation_tokens",
)
PER_PROMPT = (
    "request_prompt_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_max_num_generation_tokens",
)


def test_a_histogram_counts_the_requests_that_were_sent(load: Load) -> None:
    for name in PER_COMPLETION:
        assert load.grown(f"vllm:{name}_count") == COMPLETIONS, name
    for name in PER_PROMPT:
        assert load.grown(f"vllm:{name}_count") == PROMPTS, name
    assert load.grown("vllm:request_params_max_tokens_count") == COMPLETIONS - 1, "a chat had no limit"
    assert load.grown("vllm:inter_token_latency_seconds_count") == load.tokens("completion") - COMPLETIONS
    assert load.grown("vllm:iteration_tokens_total_count") == load.grown("dflash:steps_total")
    assert load.grown("http_request_duration_seconds_count") == 7, "six requests and a scrape"


def test_histogram_sums_equal_the_requests_and_answers(load: Load) -> None:
    prompt, out = load.tokens("prompt"), load.tokens("completion")
    chat = load.usages[2]["completion_tokens"]
    assert load.grown("vllm:request_prompt_tokens_sum") == prompt
    assert load.grown("vllm:request_prefill_kv_computed_tokens_sum") == prompt, "none fills a page"
    assert load.grown("vllm:request_generation_tokens_sum") == out == 2 * 16 + 24 + chat + 2 * 8
    assert load.grown("vllm:request_max_num_generation_tokens_sum") == 16 + 24 + chat + 8 + 8
    assert load.grown("vllm:request_params_n_sum") == COMPLETIONS
    assert load.grown("vllm:request_params_max_tokens_sum") == 2 * 16 + 24 + 2 * 8
    # Of n = 2 the prompt is computed twice; the last token of each completion never.
    twice = load.usages[0]["prompt_tokens"]
    assert load.grown("vllm:iteration_tokens_total_sum") == prompt + twice + out - COMPLETIONS
    times = {name: load.grown(f"vllm:request_{name}_time_seconds_sum") for name in ("prefill", "decode")}
    assert load.grown("vllm:request_inference_time_seconds_sum") == pytest.approx(sum(times.values()))
    whole = load.grown("vllm:e2e_request_latency_seconds_sum")
    queue = load.grown("vllm:request_queue_time_seconds_sum")
    assert whole == pytest.approx(queue + sum(times.values()))


def test_counters_count_what_was_served_and_refused(load: Load) -> None:
    twice = load.usages[0]["prompt_tokens"]
    assert load.grown("vllm:prompt_tokens_total") == load.tokens("prompt") + twice
    assert load.grown("vllm:generation_tokens_total") == load.tokens("completion")
    assert load.grown("vllm:request_success_total", finished_reason="length") == COMPLETIONS
    assert load.grown("vllm:admission_rejections_total", reason="queue_full") == 13
    for status, count in (("200", 4), ("503", 1), ("404", 1)):
        assert load.grown("http_requests_total", method="POST", status=status) == count
    assert load.grown("vllm:num_requests_waiting_by_reason") == load.grown("vllm:num_requests_waiting") == 0
    states = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
    for state, value in states.items():
        assert [v for k, v in load.after.items() if f'"{state}"' in k] == [value]


def test_draft_counts_agree_in_all_metrics(load: Load) -> None:
    spec = "vllm:spec_decode_num"
    drafts, accepted = load.grown(f"{spec}_drafts_total"), load.grown(f"{spec}_accepted_tokens_total")
    verified = load.grown(f"{spec}_draft_tokens_total")
    assert 0 < accepted == load.grown(f"{spec}_accepted_tokens_per_pos_total") < verified
    assert load.grown("dflash:spec_wasted_tokens_total") == verified - accepted
    trimmed = load.grown("dflash:spec_trimmed_tokens_total")
    assert load.grown("dflash:spec_proposed_tokens_total") == verified + trimmed
    for label in ("tenant", "category"):
        assert load.grown(f"dflash:spec_drafts_by_{label}_total") == drafts
        assert load.grown(f"dflash:spec_accepted_by_{label}_total") == accepted


def test_acceptance_is_counted_by_tenant_and_category_and_unknown_ones_share_a_label(load: Load) -> None:
    found = {
        label: {
            value: load.grown(f"dflash:spec_drafts_by_{label}_total", **{label: value})
            for value in ("acme", "body", "coding", "none", "other")
        }
        for label in ("tenant", "category")
    }
    assert found["tenant"]["acme"] > found["tenant"]["other"] > 0 and found["tenant"]["none"] > 0
    assert found["tenant"]["body"] == 0, "the header wins"
    assert found["category"]["coding"] > 0 and found["category"]["none"] > 0 == found["category"]["other"]


def test_responses_and_messages_count_for_their_tenant(http: httpx.Client, load: Load) -> None:
    again = Load(http)
    response = {"input": "hi", "max_output_tokens": 24, "metadata": {"category": "coding"}}
    message = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24}
    requested = (("/v1/responses", response, {}), ("/v1/messages", message, {"X-Tenant": "acme"}))
    for path, body, headers in requested:
        assert http.post(path, json={"ignore_eos": True, **body}, headers=headers).status_code == 200
    again.end()
    for label, value in (("category", "coding"), ("tenant", "acme")):
        assert again.grown(f"dflash:spec_drafts_by_{label}_total", **{label: value}) > 0


def test_label_values_are_bounded_in_order_of_arrival() -> None:
    values = BoundedLabels(2)
    requested = ["a", None, "b", "c", "a", "", "x" * 65, "b c", 'q"']
    shown = ["a", "none", "b", "other", "a", "other", "other", "other", "other"]
    assert [values.of(each) for each in requested] == shown
    assert BoundedLabels(0).of("a") == "other"


def test_prefix_hits_and_missing_pages_are_counted(http: httpx.Client) -> None:
    load = Load(http)
    for _ in range(2):
        load.post("/v1/completions", {"prompt": list(range(40, 104)), "max_tokens": 2})
    load.end()
    cached = load.usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 48, "three pages, and one token at least is computed"
    assert load.grown("vllm:prefix_cache_queries_total") == 128
    assert (
        load.grown("vllm:prefix_cache_hits_total") == load.grown("vllm:prompt_tokens_cached_total") == cached
    )
    assert load.grown("vllm:request_prefill_kv_computed_tokens_sum") == 128 - cached
    assert load.grown("vllm:kv_block_reuse_gap_seconds_count") == 3, "of a small pool all pages are watched"
    load.post("/v1/completions", {"prompt": "x", "n": 4, "max_tokens": 200})
    load.end()
    evicted = load.grown("vllm:kv_block_lifetime_seconds_count")
    assert evicted == load.grown("vllm:kv_block_idle_before_evict_seconds_count") > 0
    lived_s, idle_s = (
        load.grown(f"vllm:kv_block_{what}_seconds_sum") for what in ("lifetime", "idle_before_evict")
    )
    assert lived_s >= idle_s > 0
    assert load.grown("vllm:num_preemptions_total") > 0
    assert load.grown("vllm:generation_tokens_total") == 4 + 800, "no token is lost or counted twice"


def test_batch_lines_are_counted_when_they_are_durable(http: httpx.Client) -> None:
    load = Load(http)
    body = {"prompt": "ab", "max_tokens": 40, "ignore_eos": True, "metadata": {"category": "rows"}}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | more}
        for i, more in enumerate(({}, {}, {"prompt": "a long one " * 200}))
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = http.post(
        "/v1/files", files={"file": ("in.jsonl", io.BytesIO(content))}, data={"purpose": "batch"}
    ).json()
    fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=fields).json()["id"]
    wait_until(lambda: http.get(f"/v1/batches/{batch}").json()["status"] == "completed")
    load.end()
    assert load.grown("dflash:batch_rows_total", status="completed") == 2
    assert load.grown("dflash:batch_rows_total", status="failed") == 1
    assert load.grown("dflash:batch_tokens_total", kind="generation") == 80
    assert load.grown("dflash:batch_tokens_total", kind="prompt") == load.grown("vllm:prompt_tokens_total")
    assert load.grown("dflash:spec_drafts_by_category_total", category="rows") > 0
    assert load.grown("vllm:request_generation_tokens_count") == 0, "histograms are of online requests"


def test_drafter_and_cache_settings_are_labels(server: LiveServer, load: Load) -> None:
    config = server.engine.config
    (cache,) = (
        json.loads(k[len("vllm:cache_config_info") :]) for k in load.after if "cache_config_info" in k
    )
    wanted = {"block_size": "16", "num_gpu_blocks": "24", "cache_dtype": "float32"}
    assert {**wanted, "enable_prefix_caching": "True"}.items() <= cache.items()
    (drafter,) = (json.loads(k[len("dflash:drafter_info") :]) for k in load.after if "drafter_info" in k)
    spec = config.speculative_config
    assert spec is not None
    wanted = {"drafter": spec.model, "revision": "", "method": "dflash", "target": config.model}
    assert {**wanted, "status": "up", "block_size": str(len(SURVIVAL) + 1)}.items() <= drafter.items()


def test_the_measured_speed_up_and_the_reasons_for_not_drafting_are_exported(http: httpx.Client) -> None:
    """The simulated seconds: a block gives at most 4.5 tokens in 5 ms, a plain step a token in 4 ms."""
    load = Load(http)
    load.post("/v1/completions", {"prompt": "ab", "max_tokens": 200, "speculative": False})
    load.end()
    assert load.grown("dflash:spec_disabled_seconds_total", reason="not_asked") > 0
    for _ in range(8):
        load.post("/v1/completions", {"prompt": "ab", "max_tokens": 240})
    load.end()
    assert load.grown("dflash:spec_disabled_seconds_total", reason="no_drafter") == 0
    taken_s = load.grown("dflash:spec_speculating_seconds_total")
    plain_s = load.grown("dflash:spec_plain_seconds_total")
    assert 1.5 < plain_s / taken_s < 3.7
    (ratio,) = (value for name, value in load.after.items() if name.startswith("dflash:spec_speedup_ratio"))
    assert 1.5 < ratio < 3.7
    errors = [value for name, value in load.after.items() if name.startswith("dflash:spec_calibration_error")]
    assert len(errors) == len(SURVIVAL) and 0 < max(errors) < 0.5
    (length,) = (value for name, value in load.after.items() if "spec_num_speculative_tokens" in name)
    assert 1 <= length <= len(SURVIVAL)


def test_exactly_the_catalogues_metrics_are_exported_with_their_labels(
    http: httpx.Client, load: Load
) -> None:
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    assert set(families) == {metric.name for metric in CATALOGUE}
    for metric in CATALOGUE:
        samples = [s for s in families[metric.name].samples if not s.name.endswith("_bucket")]
        assert samples and all(set(s.labels) == set(metric.labels) for s in samples), metric.name
        assert all(s.labels["replica"] == "0" for s in samples)


def test_a_shared_drafters_queue_has_its_own_metrics(server: LiveServer) -> None:
    stats = replace(server.engine.stats(), drafter_use=DrafterUse(steps=7, queue_s=1.5, served_s=2.5))
    values = engine_values(stats, None)
    assert values["manta:drafter_served_steps"] == 7
    assert (values["manta:drafter_queue_seconds"], values["manta:drafter_served_seconds"]) == (1.5, 2.5)


def test_vllms_log_lines_are_written_during_activity(
    server: LiveServer, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = RequestTelemetry(server.engine, "tiny", "0")
    before = server.engine.stats()
    with caplog.at_level(logging.INFO, logger="manta.actors.observability.telemetry"):
        assert telemetry._report(before) == before and not caplog.records, "silence is not news"
        http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 64, "ignore_eos": True})
        telemetry._report(before)
    load, acceptance = (record.message for record in caplog.records)
    assert load.startswith("Engine 000: Avg prompt throughput: 0.") and "generation throughput: 6.4 " in load
    assert acceptance.startswith("SpecDecoding metrics: Mean acceptance length: ")
