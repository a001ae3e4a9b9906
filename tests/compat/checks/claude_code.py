"""Claude Code (npm's @anthropic-ai/claude-code) without a terminal, over /v1/messages."""

from __future__ import annotations

import json
import re
from typing import Any

from agent_session import (
    NOTE,
    REPORT,
    SECRET,
    Change,
    Exchange,
    Relay,
    Session,
    answered,
    called,
    calling,
    reporting,
)
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter
from trial import KEY, MODEL, check, main

PRINT = ("--output-format", "json", "--model", MODEL, "--allowedTools", "Bash")
READ = called("Bash", json.dumps({"command": f"cat {NOTE}", "description": "Read the note"}))
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def environment(relay: Relay) -> dict[str, str]:
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER")
    return {
        "ANTHROPIC_BASE_URL": relay.url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        **dict.fromkeys((*quiet, "DISABLE_ERROR_REPORTING"), "1"),
    }


def validate(event: dict[str, Any]) -> None:
    if event["type"] != "ping":  # the SDK drops these before its types
        EVENT.validate_python(event)


SESSION = Session("claude", environment, validate)


def turn(prompt: str, *answers: str | Change, resume: bool = False) -> tuple[str, list[Exchange]]:
    """Its last message, and its requests; checks what each stream adds up to."""
    changes = [answered(each) if isinstance(each, str) else each for each in answers]
    printed, exchanges = SESSION.turn(["-p", prompt, *PRINT, *(["--continue"] if resume else [])], changes)
    for exchange in exchanges:
        check_stream(exchange.events)
    return json.loads(printed)["result"], exchanges


def check_stream(events: list[dict[str, Any]]) -> None:
    """Blocks open, grow and close one after the other; the message begins and ends once."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_at, closed = None, 0
    for event in events:
        if event["type"] == "content_block_start":
            assert open_at is None and event["index"] == closed
            open_at = event["index"]
        if event["type"] == "content_block_delta":
            assert event["index"] == open_at
        if event["type"] == "content_block_stop":
            assert event["index"] == open_at
            open_at, closed = None, closed + 1
    assert open_at is None and closed


def results(exchange: Exchange) -> list[dict[str, Any]]:
    contents = (message["content"] for message in exchange.body["messages"])
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return [block for block in blocks if block["type"] == "tool_result"]


@check("-p: text, a call, its result, the answer; every event checked")
def first_turn() -> None:
    last, (_, answered) = turn("What is the number?", f"Let me look.\n{READ}", f"It is {SECRET}.")
    (result,) = results(answered)
    assert SECRET in json.dumps(result["content"]) and last == f"It is {SECRET}."


@check("-p --continue: a second turn continues with the first one's blocks")
def second_turn() -> None:
    last, exchanges = turn("Again?", READ, f"Still {SECRET}.", resume=True)
    assert len(results(exchanges[-1])) == 2 and last == f"Still {SECRET}."


@check("a call with invalid JSON gets the agent's own error, and the session continues")
def broken_call() -> None:
    broken = called("Bash", '{"command": "cat note.txt",}')
    last, exchanges = turn("Once more?", broken, READ, f"Yes, {SECRET}.", resume=True)
    assert len(results(exchanges[-1])) == 4 and last == f"Yes, {SECRET}."


@check("-p with SmolLM2: it chooses a command and writes the call, whose output returns", model="published")
def called_by_a_model() -> None:
    commands = [f"cat {NOTE}", "ls", "pwd"]
    arguments = {
        "command": {"type": "string", "enum": commands},
        "description": {"type": "string", "maxLength": 40},
    }
    choice = {"type": "any", "disable_parallel_tool_use": True}
    call = calling("Bash", "input_schema", arguments, {"tool_choice": choice})
    question = f"Read the file {NOTE}. What is the number?"
    last, (requested, answered) = turn(question, call, reporting({"tool_choice": {"type": "none"}}))
    written = "".join(
        event["delta"]["partial_json"]
        for event in requested.events
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta"
    )
    (result,) = results(answered)
    assert json.loads(written)["command"] in commands and not result.get("is_error")
    assert re.fullmatch(REPORT, last), last


main()
