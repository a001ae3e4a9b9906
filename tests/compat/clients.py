"""The tested clients: packages and test script of each. Read by `compat.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Client:
    """One environment.

    Attributes:
        name: of the client.
        package: the package with the version in the table.
        script: in `checks/`.
        also: further packages.
        npm: an npm package that is tested in place of `package`, which then only checks it.
        models: which served models its script has checks for.
    """

    name: str
    package: str
    script: str
    also: tuple[str, ...] = ()
    npm: str = ""
    models: tuple[str, ...] = ("pair",)

    @property
    def requirements(self) -> tuple[str, ...]:
        return (self.package, *self.also, *((self.npm,) if self.npm else ()))


BOTH = ("pair", "published")
CLIENTS = (
    Client("openai-python", "openai", "openai_sdk", ("jsonschema",)),
    Client("LiteLLM", "litellm", "litellm_sdk", ("mcp",)),
    Client("langchain-openai", "langchain-openai", "langchain_openai_chat"),
    Client("openai-agents", "openai-agents", "openai_agents", models=BOTH),
    Client("pydantic-ai", "pydantic-ai-slim[openai]", "pydantic_ai_agent", models=("published",)),
    Client("Anthropic SDK", "anthropic", "anthropic_sdk", ("jsonschema",)),
    Client("guidellm", "guidellm", "guidellm_run"),
    Client("aiperf", "aiperf", "aiperf_profile"),
    Client("lm-eval", "lm-eval[api]", "lm_eval_run", ("transformers",)),
    Client("Codex CLI", "openai", "codex_cli", npm="@openai/codex", models=BOTH),
    Client("Claude Code", "anthropic", "claude_code", npm="@anthropic-ai/claude-code", models=BOTH),
    Client("vllm bench serve (its requests, by aiohttp)", "aiohttp", "vllm_bench"),
)
