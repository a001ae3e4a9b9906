"""A server with scripted answers and the SDKs' clients of it; its template supports tools.

The model's steps are real; its words are a script (`scripted_executor.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.errors import EngineDeadError
from manta.cluster.step.executor import Executor
from manta.cluster.step.scheduler_output import StepResult

from support.checkpoints.text_pair import LiveServer, make_text_pair
from support.engines.scripted_executor import ScriptedExecutor

NAME = "org/tiny"
TEMPLATE = """\
{%- for t in tools or [] %}<tool_call>{"name": "{{ t['function']['name'] }}", .. {% endfor %}
{%- for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['reasoning_content'] %}<think>
{{ m['reasoning_content'] }}
</think>

{% endif %}{{ m['content'] }}
{%- for c in m['tool_calls'] or [] %}<tool_call>
{{ c['function'] | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def agents_config(folder: Path) -> EngineConfig:
    """A server of a tiny pair with that template."""
    target, drafter = make_text_pair(folder)
    settings = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return EngineConfig.from_dict(
        {
            "model": str(target),
            "speculative_config": {"model": str(drafter)},
            "dtype": "float32",
            "max_num_seqs": 2,
            "num_pages": 256,
            "num_threads": 1,
        }
    )


class Model(ScriptedExecutor):
    """Dies in its next step on command."""

    dies = False

    def collect(self) -> StepResult:
        if self.dies:
            raise EngineDeadError("told to")
        return super().collect()


class AgentsStand:
    """Enter `server` to start."""

    def __init__(self, config: EngineConfig) -> None:
        self._models: list[Model] = []
        settings = ServerSettings(served_model_name=NAME, api_key="key")
        self.server = LiveServer(config, settings, self._make_model)
        url = self.server.url
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=30)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0, timeout=30)
        self.http = httpx.Client(base_url=url, headers={"x-api-key": "key"}, timeout=30)

    def say(self, text: str) -> None:
        tokenizer = self.server.engine.tokenizer
        assert tokenizer is not None
        self._models[0].script = [
            *tokenizer.encode(text, add_special_tokens=False),
            *tokenizer.encode("<|endoftext|>", add_special_tokens=False),
        ]

    def answer_freely(self) -> dict[str, Any]:
        """Return fields that prevent endless whitespace, which JSON allows."""
        self._models[0].script = ()
        tokenizer = self.server.engine.tokenizer
        assert tokenizer is not None
        ids = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).strip() == ""]
        return {"extra_body": {"temperature": 0, "logit_bias": dict.fromkeys(map(str, ids), -100)}}

    def die(self) -> None:
        self._models[0].dies = True

    def _make_model(self, config: EngineConfig) -> Executor:
        self._models.append(Model(config))
        return self._models[0]
