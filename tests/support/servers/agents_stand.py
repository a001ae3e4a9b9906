"""A server with scripted answers and the SDKs' clients of it; its template supports tools.

The model's steps are real; its words are a script (`scripted_executor.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.step.executor import Executor

from support.checkpoints.text_pair import LiveServer, make_text_pair, tiny_settings
from support.engines.pausable_executor import PausableExecutor
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
    pair = make_text_pair(folder, template=TEMPLATE)
    return EngineConfig.from_dict(tiny_settings(pair, max_num_seqs=2, num_pages=256))


class AgentsStand:
    """Enter `server` to start."""

    def __init__(self, config: EngineConfig) -> None:
        self._models: list[ScriptedExecutor] = []
        self._executors: list[PausableExecutor] = []
        settings = ServerSettings(served_model_name=NAME, api_key="key")
        self.server = LiveServer(config, settings, self._make_model)
        url = self.server.url
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=120)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0, timeout=120)
        self.http = httpx.Client(base_url=url, headers={"x-api-key": "key"}, timeout=120)

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

    @property
    def executor(self) -> PausableExecutor:
        return self._executors[0]

    def _make_model(self, config: EngineConfig) -> Executor:
        self._models.append(ScriptedExecutor(config))
        self._executors.append(PausableExecutor(self._models[0]))
        return self.executor
