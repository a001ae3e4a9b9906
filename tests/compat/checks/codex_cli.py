"""Codex CLI (npm's @openai/codex) with its default settings, over /v1/responses."""

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
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from trial import MODEL, check, main

CONFIG = """\
model = "{model}"
model_provider = "manta"
check_for_update_on_startup = false
[model_providers.manta]
name = "manta"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "COMPAT_API_KEY"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
"""
EXEC = ("exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access")
READ = called("exec_command", json.dumps({"cmd": f"cat {NOTE}"}))


def environment(relay: Relay) -> dict[str, str]:
    from trial import FOLDER

    home = FOLDER / "home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=relay.url))
    return {"CODEX_HOME": str(home)}


SESSION = Session("codex", environment, TypeAdapter(ResponseStreamEvent).validate_python)


def turn(prompt: str, *answers: str | Change, resume: bool = False) -> tuple[str, list[Exchange]]:
    """Its last message, and its requests; checks what each stream adds up to."""
    arguments = [*EXEC, *(("resume", "--last") if resume else ()), prompt]
    changes = [answered(each) if isinstance(each, str) else each for each in answers]
    printed, exchanges = SESSION.turn(arguments, changes)
    for exchange in exchanges:
        check_stream(exchange.events)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [line["item"] for line in lines if line.get("type") == "item.completed"]
    return [item["text"] for item in items if item.get("type") == "agent_message"][-1], exchanges


def check_stream(events: list[dict[str, Any]]) -> None:
    """Items open, grow and close one after the other, and are the response's output."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    grown, items = "", []
    for event in events:
        if event["type"] == "response.output_item.added":
            grown = ""
        if event["type"].endswith(".delta"):
            grown += event["delta"]
        if event["type"] == "response.output_item.done":
            item = event["item"]
            items.append(item)
            assert grown == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    assert items == events[-1]["response"]["output"]


def items_of(exchange: Exchange) -> list[dict[str, Any]]:
    return [event["item"] for event in exchange.events if event["type"] == "response.output_item.done"]


def outputs(exchange: Exchange) -> list[dict[str, Any]]:
    return [item for item in exchange.body["input"] if item.get("type") == "function_call_output"]


@check("exec with default settings: text, a call, its result, the answer; every event checked")
def first_turn() -> None:
    last, (requested, answered) = turn("What is the number?", f"Let me look.\n{READ}", f"It is {SECRET}.")
    kinds = {tool["type"] for tool in requested.body["tools"]}
    assert {"function", "namespace", "web_search"} <= kinds, kinds
    assert "tools.web_search" in requested.headers["x-ignored-params"]
    (output,) = outputs(answered)
    assert SECRET in json.dumps(output["output"]) and last == f"It is {SECRET}."


@check("exec resume: a second turn continues with the first one's items")
def second_turn() -> None:
    last, exchanges = turn("Again?", READ, f"Still {SECRET}.", resume=True)
    assert len(outputs(exchanges[-1])) == 2 and last == f"Still {SECRET}."


@check("a call with invalid JSON gets the agent's own error, and the session continues")
def broken_call() -> None:
    broken = called("exec_command", '{"cmd": "cat note.txt",}')
    last, exchanges = turn("Once more?", broken, READ, f"Yes, {SECRET}.", resume=True)
    assert len(outputs(exchanges[-1])) == 4 and last == f"Yes, {SECRET}."


@check("a tool of a namespace is called by its own name")
def namespaced_call() -> None:
    wait = called("multi_agent_v1__close_agent", '{"target": "none"}')
    last, exchanges = turn("Close it.", wait, "There is none.", resume=True)
    (call,) = items_of(exchanges[0])
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
    assert "unsupported" not in json.dumps(outputs(exchanges[-1])[-1]) and last == "There is none."


@check("exec with SmolLM2: it chooses a command and writes the call, whose output returns", model="published")
def called_by_a_model() -> None:
    commands = {"cmd": {"type": "string", "enum": [f"cat {NOTE}", "ls", "pwd"]}}
    offered = [{"type": "function", "name": "exec_command"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": offered}
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    call = calling("exec_command", "parameters", commands, fields)
    question = f"Read the file {NOTE}. What is the number?"
    last, (requested, answered) = turn(question, call, reporting({"tool_choice": "none"}))
    (written,) = items_of(requested)
    assert json.loads(written["arguments"])["cmd"] in commands["cmd"]["enum"]
    assert len(outputs(answered)) == 1 and re.fullmatch(REPORT, last), last


main()
