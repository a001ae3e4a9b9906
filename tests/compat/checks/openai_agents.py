"""openai-agents: an agent with a tool, over chat completions and over responses, run and streamed."""

from __future__ import annotations

import json

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


checks_of(OpenAIChatCompletionsModel, "OpenAIChatCompletionsModel")
checks_of(OpenAIResponsesModel, "OpenAIResponsesModel")
main()
