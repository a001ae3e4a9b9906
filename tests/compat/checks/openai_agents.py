"""openai-agents: agents with tools and typed answers, over chat completions and responses, run and streamed.

The published model chooses what it calls and writes the arguments and the typed answer. A tool is offered
until it was called: so small a model would go on calling it.
"""

from __future__ import annotations

import json
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field
from trial import API, KEY, MODEL, check, main

set_tracing_disabled(True)
QUESTION = "Weather?"


class Reading(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    celsius: int = Field(ge=-50, le=60)


def agent(kind, requested: list[str] | None = None, **fields) -> Agent:
    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        assert requested is not None
        requested.append(city)
        return "12 degrees"

    client = AsyncOpenAI(base_url=API, api_key=KEY, max_retries=0, timeout=120)
    return Agent(
        name="A",
        instructions="Be brief.",
        model=kind(model=MODEL, openai_client=client),
        tools=[] if requested is None else [get_weather],
        **{"model_settings": ModelSettings(temperature=0, max_tokens=32), **fields},
    )


class Report(BaseModel):
    city: str
    celsius: int
    sky: Literal["sunny", "cloudy", "rainy"]
    note: str | None = Field(max_length=40)


def reporter(kind, called: list[tuple[str, str]], choice: str) -> Agent:
    """An agent with two tools and a typed answer. `called`: tools and their arguments."""

    def is_new(name: str):
        return lambda _context, _agent: name not in dict(called)

    @function_tool(is_enabled=is_new("get_weather"))
    def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
        """Returns the current weather of a city."""
        assert unit in ("celsius", "fahrenheit")
        called.append(("get_weather", city))
        return "12 degrees, rainy"

    @function_tool(is_enabled=is_new("get_time"))
    def get_time(city: str) -> str:
        """Returns the local time of a city."""
        called.append(("get_time", city))
        return "14:30"

    return Agent(
        name="Reporter",
        instructions="Use the tools, then answer.",
        model=kind(model=MODEL, openai_client=AsyncOpenAI(base_url=API, api_key=KEY, max_retries=0)),
        model_settings=ModelSettings(tool_choice=choice, max_tokens=300, temperature=0),
        tools=[get_weather, get_time],
        output_type=Report,
    )


def checks_of_calls(kind, name: str) -> None:
    @check(f"{name} with SmolLM2: it calls two tools and writes a typed answer", model="published")
    async def session() -> None:
        question = "What is the weather in Paris, and what time is it there?"
        for choice in ("required", "auto", "get_weather"):
            whole, streamed = [], []
            result = await Runner.run(reporter(kind, whole, choice), question, max_turns=4)
            stream = Runner.run_streamed(reporter(kind, streamed, choice), question, max_turns=4)
            async for _ in stream.stream_events():
                pass
            assert set(dict(whole)) == {"get_weather", "get_time"} and streamed == whole, (whole, streamed)
            assert all("Paris" in city for _, city in whole), whole
            assert isinstance(result.final_output, Report) and stream.final_output == result.final_output


def checks_of(kind, name: str) -> None:
    @check(f"{name}: run and run_streamed")
    async def run() -> None:
        whole = await Runner.run(agent(kind), QUESTION)
        streamed = Runner.run_streamed(agent(kind), QUESTION)
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds and streamed.final_output == whole.final_output

    @check(f"{name}: a tool is called and its result is returned")
    async def tool() -> None:
        requested: list[str] = []
        settings = ModelSettings(
            tool_choice="required", max_tokens=300, temperature=1, extra_body={"seed": 1}
        )
        result = await Runner.run(agent(kind, requested, model_settings=settings), QUESTION, max_turns=3)
        assert requested and result.final_output is not None

    @check(f"{name}: output_type")
    async def shaped() -> None:
        settings = ModelSettings(max_tokens=300, temperature=1, extra_body={"seed": 1})
        result = await Runner.run(agent(kind, output_type=Reading, model_settings=settings), QUESTION)
        assert isinstance(result.final_output, Reading), json.dumps(str(result.final_output))


for each in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    checks_of(each, each.__name__)
    checks_of_calls(each, each.__name__)
main()
