"""langchain-openai: ChatOpenAI and OpenAI, invoked, streamed, with tools and structured output."""

from __future__ import annotations

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field
from trial import API, KEY, MODEL, TOOL, check, main

COMMON = {"base_url": API, "api_key": KEY, "model": MODEL, "max_retries": 0, "timeout": 120}
QUESTION = "Write a function that adds two numbers."


class Reading(BaseModel):
    """A reading of the weather."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    celsius: int = Field(ge=-50, le=60)


def chat(**fields):
    return ChatOpenAI(**{**COMMON, "temperature": 0, "max_tokens": 32, **fields})


@check("ChatOpenAI: invoke, stream, batch; usage")
def invoke() -> None:
    whole = chat().invoke(QUESTION)
    assert whole.content and whole.usage_metadata["output_tokens"] <= 32
    pieces = list(chat(stream_usage=True).stream(QUESTION))
    total = sum(pieces[1:], pieces[0])
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert [answer.content for answer in chat().batch([QUESTION] * 3)] == [whole.content] * 3


@check("ChatOpenAI.ainvoke and astream")
async def asynchronous() -> None:
    whole = await chat().ainvoke(QUESTION)
    assert "".join([piece.content async for piece in chat().astream(QUESTION)]) == whole.content


@check("with_structured_output: json_schema and function_calling")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        # The penalty, for JSON allows blanks without end, and so small a model may write nothing else.
        model = chat(max_tokens=400, frequency_penalty=2.0)
        assert isinstance(model.with_structured_output(Reading, method=method).invoke("Weather?"), Reading)


@check("bind_tools with tool_choice, complete and streamed")
def tools() -> None:
    bound = chat(max_tokens=120, temperature=1, seed=4).bind_tools([TOOL], tool_choice="get_weather")
    assert set(bound.invoke("Weather?").tool_calls[0]["args"]) == {"city"}
    pieces = list(bound.stream("Weather?"))
    assert sum(pieces[1:], pieces[0]).tool_calls[0]["name"] == "get_weather"


@check("ChatOpenAI over /v1/responses")
def responses() -> None:
    assert chat(use_responses_api=True).invoke(QUESTION).text


@check("OpenAI (text completion): invoke, stream")
def completion() -> None:
    model = OpenAI(**COMMON, temperature=0, max_tokens=16)
    assert "".join(model.stream("def add(a, b):")) == model.invoke("def add(a, b):")


main()
