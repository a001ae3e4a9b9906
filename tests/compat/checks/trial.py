"""Common parts of the checks of all clients. They run in a client's environment with Python alone.

A script names its checks with `@check("what is seen")` and ends with `main()`, which runs those for the
served model in their order and prints a line of JSON about each. `compat.py` starts the scripts and reads the
lines.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

URL = os.environ["COMPAT_URL"]  # of the server, without a path
API = f"{URL}/v1"
MODEL = os.environ["COMPAT_MODEL"]
TARGET = os.environ["COMPAT_TARGET"]  # its checkpoint, for clients with a tokenizer of their own
SERVED = os.environ["COMPAT_SERVED"]  # the shipped "pair", or a "published" model
KEY = os.environ["COMPAT_API_KEY"]
FOLDER = Path(os.environ["COMPAT_FOLDER"])  # for what a client writes

USER = [{"role": "user", "content": "Write a function that adds two numbers."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "celsius": {"type": "integer", "minimum": -50, "maximum": 60},  # the pair would write digits for ever
    },
    "required": ["city", "celsius"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

TOOL: dict[str, Any] = {"type": "function", "function": WEATHER}  # of OpenAI's chat API
FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
}

_checks: list[tuple[str, Callable[[], Any]]] = []


def check(
    title: str, model: Literal["pair", "published"] = "pair"
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function for a served model; a coroutine function is awaited. It fails by raising."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        if model == SERVED:
            _checks.append((title, function))
        return function

    return register


def error_of(wanted: type[Exception], call: Callable[..., object], **fields: object) -> Any:
    """Return the error that a call raises, which must be of this type."""
    try:
        call(**fields)
    except wanted as error:
        return error
    raise AssertionError(f"{wanted.__name__} was not raised")


def main() -> None:
    """Run all registered functions."""
    for title, function in _checks:
        failure = ""
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_finish(result))
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        print(json.dumps({"check": title, "failure": failure}), flush=True)


async def _finish(result: Any) -> None:
    await result


def command(name: str, *arguments: str) -> None:
    """Run a program of the client's environment. Raises with its last output if it fails."""
    program = Path(sys.executable).with_name(name)
    done = subprocess.run(
        [program, *arguments],
        cwd=FOLDER,
        env={**os.environ, "OPENAI_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stdout.strip()[-400:]}")
