"""`manta generate`: continues one prompt on standard output, in this process and without Ray."""

from __future__ import annotations

import sys
from collections.abc import Generator
from dataclasses import asdict

from ...actors.engine.output_processor import RequestMetrics, RequestOutput
from ...actors.llm import LLM
from ...actors.tokenization.prompts import Prompt, encode_prompt
from ...cluster.config import EngineConfig
from ...cluster.errors import RequestError
from ...cluster.request.request import SamplingParams
from ...cluster.step.limits import check_room


def open_llm(config: EngineConfig) -> LLM:
    return LLM(**asdict(config))


def generate_text(
    config: EngineConfig, prompt: str, params: SamplingParams, limit: int | None = None
) -> None:
    """Stream the continuation of `prompt` to standard output and print statistics on standard error.

    `limit`: max_tokens if the user gave it; prompt and answer must fit into the context, as over HTTP.
    """
    if not prompt:
        raise RequestError("prompt is empty: give some text to continue.", param="prompt")
    with open_llm(config) as llm:
        last = None
        for delta in stream_text(llm, prompt, params, limit):
            last = delta
        sys.stdout.write("\n")
        if last is not None:
            print(summary(last.metrics, llm), file=sys.stderr)


def stream_text(
    llm: LLM, prompt: Prompt, params: SamplingParams, limit: int | None
) -> Generator[RequestOutput]:
    encoded = encode_prompt(prompt, llm.tokenizer)
    check_room(len(encoded.token_ids), limit, llm.info.max_model_len)
    for delta in llm.stream(encoded, params):
        sys.stdout.write(delta.outputs[0].text)
        sys.stdout.flush()
        yield delta


def summary(metrics: RequestMetrics, llm: LLM) -> str:
    tokens = llm.stats().generation_tokens
    line = f"[{tokens} tokens, {tokens / max(metrics.e2e_s, 1e-9):.1f} tokens/s"
    if (length := metrics.mean_acceptance_length) is not None:
        line += f", mean acceptance length {length:.2f}"
    return line + "]"
