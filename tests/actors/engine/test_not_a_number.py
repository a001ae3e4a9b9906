"""NaN logits end their own request with an error and change no other's answer."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from manta import LLM, SamplingParams
from manta.cluster.config import EngineConfig
from manta.cluster.step import scheduler_output
from manta.drafter.step.sampling import gumbel_argmax as choice
from safetensors.torch import load_file, save_file
from support.checkpoints.text_pair import NOT_A_NUMBER, LiveServer, make_pair_with_nan, tiny_settings
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines import device_engines
from support.engines.device_engines import SMALL_STATES, Twins
from support.engines.opened import core_of
from support.servers.server_probes import http_client

BROKEN, GOOD = 77, [[5, 6, 7, 8, 9, 10, 11], [21, 22, 23], list(range(40, 60))]
BAD = [[1, 2, BROKEN, 3], [BROKEN], [9] * 20 + [BROKEN]]
SIZES = {"head_dim": 32, "intermediate_size": 128}  # such as compiled loops take
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
HOT = SamplingParams(temperature=1.0, seed=3, top_k=20, top_p=0.9, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three targets: a sound one, one that computes NaN after a token, and one with a NaN in its head."""
    found = {}
    tensors = {"sound": None, "embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    for name, tensor in tensors.items():
        folder = make_tiny_target(tmp_path_factory.mktemp(name), "llama", seed=5, **SIZES)
        found[name] = broken(folder, tensor)
    return found


def broken(target: Path, tensor: str | None = "model.embed_tokens.weight") -> Path:
    """Write NaN to a token's row of a tensor, in place; the target never generates that token."""
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"][BROKEN] = 0.0
    if tensor is not None:
        weights[tensor][BROKEN] = math.nan
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def opened(target: Path, backend: str, drafter: Path | None) -> LLM:
    how = {} if backend == "triton" else {"device": "cpu"}
    how["dtype"] = "bfloat16" if backend == "compiled" else "float32"
    return device_engines.opened(target, drafter, backend, max_num_seqs=4, num_pages=16, **how)


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[str | None, list[int]]]:
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [(each.outputs[0].finish_reason, each.outputs[0].token_ids) for each in found]


@pytest.mark.parametrize("backend", ["torch", "compiled", "triton"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_request_with_nan_ends_and_does_not_affect_others(
    targets: dict[str, Path], tmp_path: Path, backend: str, drafts: bool
) -> None:
    """Requests that reuse its pages afterwards read none of its content."""
    slow = backend == "triton"  # in its interpreter: two tokens, the second after drafts
    if slow and not drafts:
        pytest.skip("with drafts it computes all that it does without, and more")
    rounds = ((True, replace(HOT, max_tokens=2)),) if slow else ((False, GREEDY), (True, HOT))
    drafter = make_tiny_drafter(tmp_path, head_dim=32) if drafts else None
    expected: dict[bool, list] = {}
    for name in ("sound", "embedding"):
        with opened(targets[name], backend, drafter) as llm:
            for is_hot, params in rounds:
                if name == "sound":
                    expected[is_hot] = answers(llm, GOOD, params)
                    continue
                mixed = [prompt for pair in zip(GOOD, BAD, strict=True) for prompt in pair]
                for _ in range(1 if slow else 2):
                    found = answers(llm, mixed, params)
                    assert found[::2] == expected[is_hot]
                    assert found[1::2] == [("error", [])] * len(BAD)
                assert answers(llm, GOOD, params) == expected[is_hot]
            core_of(llm).check_invariants()


# The target's next token is the third, after which prompt lookup drafts the three that follow it.
REPEATED = {"llama": [5, 95, 11, 9, 7, 8, 95], "qwen3_5": [5, 20, 10, 9, 7, 8, 20]}


@pytest.mark.parametrize("family", REPEATED)
@torch.inference_mode()
def test_a_rejected_draft_with_nan_ends_no_request_but_a_prompts_nan_does(
    targets: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """On the device as on the host, also in a part of a prompt that samples nothing."""
    target, prompt = targets["embedding"], REPEATED[family]
    if family == "qwen3_5":  # with recurrent states
        target = broken(make_tiny_target(tmp_path, family, seed=5, num_hidden_layers=2, **SMALL_STATES))
    twins = Twins.open(target, None, [prompt, [1, BROKEN, 2]], method="ngram")
    enter = [twins.steps.admit(slot, tokens) for slot, tokens in enumerate(twins.known)]
    first = twins.run([0, 0], [len(prompt), 3], [0, 0], admitted=enter, samples=[True, False])
    assert first.token_ids[:, 0].tolist() == [prompt[2], scheduler_output.NOT_A_NUMBER]
    assert first.num_tokens.tolist() == [1, 0]
    twins.device.models.memory.states.tables.token_ids[0, 3] = BROKEN  # as if a drafter proposed it
    twins.host.states.token_ids[0, 3] = BROKEN
    second = twins.run([len(prompt)], [4], [3])
    assert second.num_tokens.tolist() == [1] and second.token_ids[0, 0] >= 0
    third = twins.run([len(prompt) + 1], [1], [0])  # reads the K/V and states that the drafts left
    assert third.token_ids[0, 0] >= 0


@pytest.mark.parametrize("backend", ["torch", "compiled", "triton"])
@pytest.mark.parametrize(
    "params", [GREEDY, HOT, replace(GREEDY, logprobs=2), replace(GREEDY, prompt_logprobs=1)]
)
@pytest.mark.one_in(2)
def test_a_nan_in_the_head_never_becomes_a_token(
    targets: dict[str, Path], backend: str, params: SamplingParams
) -> None:
    with opened(targets["head"], backend, None) as llm:
        assert answers(llm, GOOD, params) == [("error", [])] * len(GOOD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loops_detect_nan_as_the_definition(dtype: torch.dtype) -> None:
    loops = pytest.importorskip("manta.drafter.step.cpu_numba.step_ops").LOOPS
    z = torch.randn(9, 1003, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row, value in enumerate((math.nan, -math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0)):
        z[row, 500 + row] = value
    z[7] = -math.inf
    assert loops.are_numbers(z).tolist() == choice.are_numbers(z).tolist()
    assert choice.are_numbers(z).tolist() == [False] * 3 + [True] * 6


CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
    "/v1/messages": CHAT,
}
TEXTS: dict[str, tuple[str | int, ...]] = {  # where they are in an answer
    "/v1/completions": ("choices", 0, "text"),
    "/v1/chat/completions": ("choices", 0, "message", "content"),
    "/v1/responses": ("output", 0, "content", 0, "text"),
    "/v1/messages": ("content", 0, "text"),
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    pair = make_pair_with_nan(tmp_path_factory.mktemp("pair"))
    config = EngineConfig.from_dict(tiny_settings(pair, num_pages=64))
    with LiveServer(config) as server, http_client(server.url) as http:
        yield http


def body(path: str, content: str = "x", **fields: object) -> dict[str, Any]:
    """A request that is answered except for the effect of its content or a field."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    found = {**json.loads(json.dumps(BODIES[path]).replace('"x"', json.dumps(content)))}
    return {**found, limit: 6, "temperature": 0, "ignore_eos": True, **fields}


@pytest.mark.parametrize("path", BODIES)
def test_an_http_request_with_nan_gets_an_error_and_others_continue(http: httpx.Client, path: str) -> None:
    """NaN in the prompt gives a status; after a forced first token, an error event of the API."""
    good = http.post(path, json=body(path))
    assert good.status_code == 200
    forced = {"allowed_token_ids": http.post("/tokenize", json={"prompt": NOT_A_NUMBER}).json()["tokens"]}
    for fields in ({"content": NOT_A_NUMBER}, forced):
        whole = http.post(path, json=body(path, **fields))
        assert whole.status_code == 500 and "not numbers" in whole.json()["error"]["message"]
        assert "--dtype" in whole.text and '"x"' not in whole.text
        stream = http.post(path, json=body(path, stream=True, **fields))
        assert "not numbers" in stream.text
        if fields is not forced:
            assert stream.status_code == 500
            continue
        assert stream.status_code == 200
        events = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
        last = json.loads(events[-1])
        assert len(events) > 1 and (last.get("error") or last["response"]["error"])["message"]
    again = http.post(path, json=body(path))
    assert again.status_code == 200
    texts = [functools.reduce(lambda found, key: found[key], TEXTS[path], a.json()) for a in (good, again)]
    assert texts[0] and texts[0] == texts[1]
    assert http.get("/health").status_code == 200
