"""Translation of requests by the HTTP layer before the engine sees them, and failures after it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from manta.actors.http.anthropic.request import MessagesRequest
from manta.actors.http.config.settings_mapping import split_settings
from manta.actors.http.protocol.chat_completion import ChatRequest, conversation
from manta.actors.http.protocol.completion import CompletionRequest
from manta.actors.http.protocol.protocol import REFUSED, GenerationRequest, check_extra_fields
from manta.actors.http.responses.request import ResponsesRequest
from manta.actors.http.wire.errors import ClientDisconnectedError, error_response, public_error
from manta.actors.http.wire.json_io import NUMBERS_IN_TEXT
from manta.actors.http.wire.sse import cancel_on_disconnect
from manta.actors.observability.prometheus_text import family_of
from manta.actors.observability.telemetry import acceptance_line, engine_line
from manta.actors.tokenization.generation_config import GenerationDefaults
from manta.cluster.engine.engine_stats import EngineStats
from manta.cluster.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    MantaError,
    OverloadedError,
    RequestError,
    did_you_mean,
)
from manta.cluster.metrics.metric import Histogram, Metric
from manta.cluster.request.request import SamplingParams
from pydantic import BaseModel, ValidationError
from starlette.requests import Request


def completion(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


def params(request: GenerationRequest, **defaults: object) -> SamplingParams:
    return request.sampling_params(GenerationDefaults(**defaults), 16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_comes_in_four_forms(given: object, wanted: object) -> None:
    assert completion(prompt=given).prompt == wanted


def test_a_requests_fields_override_the_checkpoints_which_override_openais() -> None:
    assert params(completion()).temperature == 1.0
    assert params(completion()).max_tokens == 16
    assert params(completion(), temperature=0.6, max_tokens=99).temperature == 0.6
    assert params(completion(), temperature=0.6, max_tokens=99).max_tokens == 99
    assert params(completion(temperature=0.0), temperature=0.6).temperature == 0.0


def test_generation_config_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults()
    says = '{"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 1}'
    (tmp_path / "generation_config.json").write_text(says)
    found = GenerationDefaults.load(tmp_path)
    assert found == GenerationDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05)
    assert params(completion(), repetition_penalty=1.05).repetition_penalty == 1.05
    assert params(completion(repetition_penalty=1), repetition_penalty=1.05).repetition_penalty == 1.0
    for says, words in (
        ("{", "JSON"),
        ("[]", "JSON object"),
        ('{"temperature": "0.6"}', "temperature.*a number from 0 to 100.*generation_config: openai"),
        ('{"max_new_tokens": true}', "max_tokens.*at least 1"),
    ):
        (tmp_path / "generation_config.json").write_text(says)
        with pytest.raises(CheckpointError, match=words) as refused:
            GenerationDefaults.load(tmp_path)
        assert refused.value.param == "generation_config"


def test_max_completion_tokens_takes_precedence() -> None:
    assert params(completion(max_tokens=3, max_completion_tokens=5)).max_tokens == 5


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": True}),
        (ResponsesRequest, {"input": "x", "max_output_tokens": True}),
    ],
)
def test_a_boolean_is_no_number(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="true or false"):
        model.model_validate(body)


@pytest.mark.parametrize(
    "fields",
    [{"n": "2"}, {"max_tokens": "1_0"}, {"temperature": "0.5"}, {"speculative": {"max_tokens": "3"}}],
)
def test_numbers_are_text_only_in_rows_of_a_dataset(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="a number, not text"):
        CompletionRequest.model_validate({"prompt": "x", **fields})
    read = CompletionRequest.model_validate({"prompt": "x", **fields}, context=NUMBERS_IN_TEXT)
    assert read.model_fields_set > {"prompt"}


def test_a_single_stop_string_becomes_a_list() -> None:
    assert params(completion(stop="\n")).stop == ("\n",)
    assert params(completion(stop=["a", "b"])).stop == ("a", "b")
    assert params(completion(stop=None)).stop == ()


@pytest.mark.parametrize("given", [False, {"enabled": False}])
def test_speculation_can_be_disabled_per_request(given: object) -> None:
    assert not completion(speculative=given).speculative.enabled
    assert completion().speculative.enabled


def test_a_request_can_limit_its_drafts() -> None:
    assert completion(speculative={"max_tokens": 3}).speculative.max_draft_tokens == 3
    assert completion(speculative={"max_tokens": 3, "enabled": False}).speculative.max_draft_tokens == 0
    assert completion(speculative=True).speculative.max_draft_tokens is None


def chat(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def test_text_parts_and_other_keys_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "assistant", "content": parts, "reasoning_content": "why"}])
    (message,) = conversation(request, request.messages, None).messages
    names = ("reasoning", "reasoning_content", "thinking")
    assert message == {"role": "assistant", "content": parts, **dict.fromkeys(names, "why")}


def test_unknown_fields_of_a_chat_request_are_kept_for_inspection() -> None:
    assert chat(frobnicate=1).model_extra == {"frobnicate": 1}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_unsupported_field_is_refused_unless_it_has_its_default(name: str) -> None:
    for value in (None, *REFUSED[name]):
        assert check_extra_fields({name: value}, [], "warn") == []
    with pytest.raises(RequestError) as caught:
        check_extra_fields({name: {"some": "thing"}}, [], "ignore")
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "unused", "remedy"), [("best_of", 1, "n completions"), ("suffix", "", "prompt")]
)
def test_unsupported_features_are_refused_with_an_alternative(name: str, unused: object, remedy: str) -> None:
    assert check_extra_fields({name: unused}, [], "reject") == []
    with pytest.raises(RequestError, match=remedy) as caught:
        check_extra_fields({name: "x"}, [], "ignore")
    assert caught.value.param == name


def test_unknown_fields_are_reported_or_refused_with_the_nearest_name() -> None:
    known = CompletionRequest.model_fields
    assert check_extra_fields({"temprature": 1, "user": "me"}, known, "warn") == ["temprature"]
    with pytest.raises(RequestError, match="Did you mean temperature"):
        check_extra_fields({"temprature": 1}, known, "reject")
    with pytest.raises(RequestError, match=r"frobnicate is not a known field\. Leave it out\."):
        check_extra_fields({"frobnicate": 1}, known, "reject")


def test_the_remedy_for_an_unknown_name_is_the_nearest_or_all_names() -> None:
    known = ["model", "method"]
    assert did_you_mean("modle", known, prefix="spec.") == "Did you mean spec.model?"
    assert did_you_mean("x", known) == "Known: model, method."
    assert did_you_mean("x", known, fallback="See there.") == "See there."


def test_one_mapping_is_sorted_into_engine_and_server_settings() -> None:
    engine, server = split_settings(
        {
            "model": "m",
            "max_num_seqs": 3,
            "served_model_name": ["a", "b"],
            "speculative_config": {"model": "d"},
        }
    )
    assert engine.max_num_seqs == 3 and engine.speculative_config is not None
    assert server.model_names("m") == ("a", "b")
    assert split_settings({"model": "m"})[1].model_names("m") == ("m",)


@pytest.mark.parametrize(
    ("args", "param"),
    [
        ({"model": "m", "max_num_seq": 3}, "max_num_seq"),
        ({"model": "m", "unknown_param": "warn"}, "unknown_param"),
        ({"max_num_seqs": 3}, "model"),
        ({"model": "m", "unknown_params": "maybe"}, "unknown_params"),
        ({"model": "m", "speculative_config": {"modle": "d"}}, "speculative_config.modle"),
    ],
)
def test_a_wrong_setting_is_named(args: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_settings(args)
    assert caught.value.param == param
    if param in ("max_num_seq", "unknown_param"):
        assert f"Did you mean {param}s?" in caught.value.message


def test_nothing_of_the_server_leaks_through_an_error() -> None:
    for error in (CheckpointError("/secret/path is broken"), ValueError("/secret"), MantaError("/secret")):
        shown = public_error(error)
        assert shown.status == 500 and "secret" not in shown.message
    assert "secret" not in public_error(EngineDeadError("pid 7 on /secret")).message
    assert public_error(RequestError("n is wrong", param="n")).param == "n"


def test_retryable_failures_say_when_and_deterministic_ones_say_never() -> None:
    assert error_response(OverloadedError("full")).headers["retry-after"]
    assert error_response(EngineDeadError("gone")).headers["retry-after"]
    assert error_response(MantaError("bug")).headers["x-should-retry"] == "false"
    plain = error_response(RequestError("wrong")).headers
    assert "retry-after" not in plain and "x-should-retry" not in plain


def stats(**counts: Any) -> EngineStats:
    return EngineStats(**{"accepted_per_pos": (0, 0), **counts})


def test_work_for_a_disconnected_client_is_cancelled() -> None:
    ends: list[str] = []

    async def disconnect() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def compute() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def ask() -> None:
        with pytest.raises(ClientDisconnectedError):
            await cancel_on_disconnect(Request({"type": "http"}, disconnect), compute())
        assert ends == ["cancelled"]

    asyncio.run(ask())


def test_the_engine_log_line_covers_the_time_between_two_snapshots() -> None:
    before = stats(prompt_tokens=100, generation_tokens=50, prefix_cache_queries=100, prefix_cache_hits=90)
    after = stats(
        prompt_tokens=200,
        generation_tokens=250,
        prefix_cache_queries=200,
        prefix_cache_hits=115,
        running=3,
        waiting=2,
        kv_usage=0.125,
    )
    assert engine_line(before, after, 10.0) == (
        "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 20.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )
    assert engine_line(after, after, 10.0).endswith("Prefix cache hit rate: 0.0%")


def test_the_acceptance_log_line_covers_the_time_between_two_snapshots() -> None:
    before = stats(num_drafts=10, num_draft_tokens=20, num_accepted_tokens=20, accepted_per_pos=(10, 10))
    after = stats(num_drafts=14, num_draft_tokens=28, num_accepted_tokens=25, accepted_per_pos=(14, 11))
    line = acceptance_line(before, after, 10.0, None)
    assert line.startswith("SpecDecoding metrics: Mean acceptance length: 2.25, ")
    assert "Accepted: 5 tokens, Drafted: 8 tokens" in line
    assert line.endswith("Per-position acceptance rate: 1.000, 0.250, Avg Draft acceptance rate: 62.5%")
    assert acceptance_line(before, after, 10.0, 1.5) == f"{line}, Measured speed-up: 1.50x"


def test_a_histogram_counts_up_to_and_including_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, count in ((1.0, 1), (1.5, 3), (9.0, 2)):
        histogram.observe(value, count)
    metric = Metric("h", "histogram", "seconds", "help", (), (1.0, 2.0))
    family = family_of(metric, {}, histogram.counts())
    assert {s.labels.get("le", s.name): s.value for s in family.samples} == {
        "1.0": 1.0,
        "2.0": 4.0,
        "+Inf": 6.0,
        "h_count": 6.0,
        "h_sum": 1.0 + 4.5 + 18.0,
    }
