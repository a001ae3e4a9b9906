"""An engine in its own process that answers prompts over and over, to be killed.

Reads one line of JSON: `settings` of `LLM`, `prompts` as token ids, `max_tokens`, and how many prompts run
`at_once`. Prints one for each answer: the prompt's number, the tokens, and the prompt tokens read from the
tier so far.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from manta import LLM, SamplingParams


def answer_forever(
    settings: dict[str, Any],  # Any: fields of EngineConfig
    prompts: list[list[int]],
    max_tokens: int,
    at_once: int,
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(**settings) as llm:
        for begin in itertools.count(step=at_once):
            numbers = [(begin + i) % len(prompts) for i in range(at_once)]
            outputs = llm.generate([{"prompt_token_ids": prompts[number]} for number in numbers], params)
            for number, output in zip(numbers, outputs, strict=True):
                answer = {"prompt": number, "tokens": output.outputs[0].token_ids}
                print(json.dumps({**answer, "read": llm.stats().tier_hits}), flush=True)


if __name__ == "__main__":
    answer_forever(**json.loads(sys.stdin.readline()))
