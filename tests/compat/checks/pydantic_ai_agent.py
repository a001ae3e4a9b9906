"""pydantic-ai: agents with two tools and a typed answer of a published model, over both of OpenAI's APIs.

A tool is offered until it was called: so small a model would go on calling it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from trial import API, KEY, MODEL, check, main

QUESTION = "What is the weather in Paris, and what time is it there?"


class Report(BaseModel):
    city: str = Field(max_length=20)
    celsius: int
    sky: Literal["sunny", "cloudy", "rainy"]


def agent(kind, output, called: list[tuple[str, str]]) -> Agent:
    async def prepare(_context, tool):
        return None if tool.name in dict(called) else tool

    made = Agent(
        kind(MODEL, provider=OpenAIProvider(base_url=API, api_key=KEY)),
        output_type=output,
        system_prompt="Use the tools, then answer.",
        model_settings={"max_tokens": 300, "temperature": 0},
    )

    @made.tool_plain(prepare=prepare)
    def get_weather(city: str) -> str:
        """Returns the current weather of a city."""
        called.append(("get_weather", city))
        return "12 degrees, rainy"

    @made.tool_plain(prepare=prepare)
    def get_time(city: str) -> str:
        """Returns the local time of a city."""
        called.append(("get_time", city))
        return "14:30"

    return made


def checks_of(kind) -> None:
    @check(f"{kind.__name__} with SmolLM2: it calls two tools and writes a typed answer", model="published")
    async def native() -> None:
        called: list[tuple[str, str]] = []
        result = await agent(kind, NativeOutput(Report), called).run(QUESTION)
        assert isinstance(result.output, Report)
        assert set(dict(called)) == {"get_weather", "get_time"}, called
        assert all("Paris" in city for _, city in called), called

    @check(f"{kind.__name__} with SmolLM2, ToolOutput: the typed answer is a call", model="published")
    async def by_call() -> None:
        result = await agent(kind, ToolOutput(Report), []).run(QUESTION)
        assert isinstance(result.output, Report)


checks_of(OpenAIChatModel)
checks_of(OpenAIResponsesModel)
main()
