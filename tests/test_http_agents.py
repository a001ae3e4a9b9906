"""/v1/responses and /v1/messages as their own SDKs see them, over real HTTP; what they ask is written by the test.

The model's steps are real; its words are a script (`scripted_executor.py`), so that it calls tools.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from manta.actors.http.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.errors import EngineDeadError
from manta.cluster.executor import Executor
from manta.cluster.plan import StepResult
from scripted_executor import ScriptedExecutor
from text_pair import LiveServer, make_text_pair

NAME = "org/tiny"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer with <tool_call>{\"name\": .., \"arguments\": ..}"
    "</tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n{{ c['function'] | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nRain, perhaps?\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("weather", "clock")]
TOOLS_A = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "clock")]
ASK: dict[str, Any] = {"model": NAME, "input": "Oslo?", "max_output_tokens": 400}
ASK_A: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Oslo?"}], "max_tokens": 400}


class Model(ScriptedExecutor):
    """Dies in a step when it is told to."""

    dies_after: int | None = None

    def collect(self) -> StepResult:
        result = super().collect()
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                raise EngineDeadError("told to")
        return result


class Stand:
    """A server whose next answers are written; the SDKs' clients of it."""

    def __init__(self, server: LiveServer, models: list[Model]) -> None:
        self.server = server
        self._models = models
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0, timeout=30)
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0, timeout=30)
        self.http = httpx.Client(base_url=server.url, headers={"x-api-key": "key"}, timeout=30)

    def say(self, text: str) -> None:
        tokenizer = self.server.engine.tokenizer
        assert tokenizer is not None
        self._models[0].script = [
            *tokenizer.encode(text, add_special_tokens=False),
            *tokenizer.encode("<|endoftext|>", add_special_tokens=False),
        ]

    def die_after(self, steps: int) -> None:
        self._models[0].dies_after = steps


@pytest.fixture(scope="module")
def make_stand(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    target, drafter = make_text_pair(tmp_path_factory.mktemp("pair"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    config = EngineConfig.from_dict(
        {
            "model": str(target),
            "speculative_config": {"model": str(drafter)},
            "dtype": "float32",
            "max_num_seqs": 2,
            "num_pages": 256,
            "num_threads": 1,
        }
    )
    models: list[Model] = []

    def make(config: EngineConfig) -> Executor:
        models[:] = [Model(config)]
        return models[0]

    server = LiveServer(config, ServerSettings(served_model_name=NAME, api_key="key"), make)
    return lambda: (server, models)


@pytest.fixture(scope="module")
def stand(make_stand: Callable[..., Any]) -> Iterator[Stand]:
    server, models = make_stand()
    with server:
        yield Stand(server, models)
