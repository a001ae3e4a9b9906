"""Converts tools of /v1/responses to functions of a chat, and calls of those functions to items of this API.

Types other than functions that the client runs become functions: the tools of a namespace, custom tools
(which take one string) and the local shell. Tools that OpenAI's servers run are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....cluster.errors import RequestError, brief
from ...tokenization.client_messages import read_object
from ..wire.json_io import JsonObject

Kind = Literal["function", "custom", "local_shell"]
INPUT = "input"  # the only property of a custom tool
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_SHELL_SCHEMA = {
    "type": "object",
    "properties": {
        "command": {
            "type": "array",
            "items": {"type": "string"},
            "description": "The program, its arguments.",
        },
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ClientTool:
    kind: Kind
    # within its namespace
    name: Any  # chat validation refuses what is not a string
    namespace: str | None
    function: JsonObject  # in chat's format, with the flat name
    at: str  # path in the body

    def call_item(self, call_id: str, arguments: str) -> JsonObject:
        call = {"call_id": call_id, "name": self.name}
        if self.namespace is not None:
            call["namespace"] = self.namespace
        if self.kind == "custom":
            return {"type": "custom_tool_call", **call, "input": _custom_input(arguments)}
        if self.kind == "local_shell" and (action := _shell_action(arguments)) is not None:
            return {"type": "local_shell_call", "call_id": call_id, "action": action}
        return {"type": "function_call", **call, "arguments": arguments}


def flat_name(namespace: Any, name: str) -> str:  # Any: JSON
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class ClientTools:
    def __init__(self, given: Sequence[JsonObject]) -> None:
        self.left_out: list[str] = []  # types of the others, as X-Ignored-Params names them
        self.tools = list(self._read(given, "tools"))  # those that the client runs
        self._by_name = {tool.function["name"]: tool for tool in self.tools}

    def called(self, name: str) -> ClientTool:
        """Return the called tool; an unknown name is treated as a function."""
        return self._by_name.get(name) or ClientTool("function", name, None, {"name": name}, "tools")

    def choice(self, given: str | JsonObject | None) -> str | JsonObject | None:
        """Return the chat's `tool_choice`. Raises RequestError for a tool that cannot be offered."""
        if given == "required" and self.left_out:
            raise RequestError(
                f"{self.left_out[0]}: OpenAI's servers run this tool, and this server cannot require its "
                'calls. Leave it out, or send tool_choice "auto".',
                param="tools",
            )
        if given is None or isinstance(given, str):
            return given
        kind, name, namespace = given.get("type"), given.get("name"), given.get("namespace")
        for tool in self.tools:
            names = (tool.name, tool.function["name"]) if namespace is None else (tool.name,)
            is_named = name in names and namespace in (None, tool.namespace)
            if kind == tool.kind and (is_named or kind == "local_shell"):
                return {"type": "function", "function": {"name": tool.function["name"]}}
        raise RequestError(
            f"tool_choice: {brief(given)} is no tool of this request that a client runs. Name a function or "
            "a custom tool of `tools`, or send none, auto or required.",
            param="tool_choice",
        )

    def _read(
        self, given: Sequence[JsonObject], at: str, namespace: str | None = None
    ) -> Iterator[ClientTool]:
        for i, tool in enumerate(given):
            kind, place = tool.get("type"), f"{at}.{i}"
            if kind == "namespace" and namespace is None:
                yield from self._read_namespace(tool, place)
            elif kind in ("function", "custom", "local_shell"):
                name = "local_shell" if kind == "local_shell" else tool.get("name")
                flat = flat_name(namespace, name) if isinstance(name, str) else name
                function = {**_function(kind, tool), "name": flat}
                yield ClientTool(kind, name, namespace, function, place)
            elif isinstance(kind, str):
                self.left_out += [f"tools.{kind}"] * (f"tools.{kind}" not in self.left_out)
            else:
                raise RequestError(f"{place}.type must be a string.", param=f"{place}.type")

    def _read_namespace(self, given: JsonObject, at: str) -> Iterator[ClientTool]:
        """Yield a namespace's tools; its description is appended to that of the first tool."""
        name, tools = given.get("name"), given.get("tools")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{at}.name must be a string.", param=f"{at}.name")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RequestError(f"{at}.tools must be a list of tools.", param=f"{at}.tools")
        for i, tool in enumerate(self._read(tools, f"{at}.tools", name)):
            if i == 0 and isinstance(about := given.get("description"), str) and about:
                own = tool.function.get("description")
                note = f"(Tools {flat_name(name, '*')}: {about})"
                tool.function["description"] = f"{own}\n\n{note}" if own else note
            yield tool


def _function(kind: Kind, tool: Mapping[str, Any]) -> JsonObject:
    if kind == "function":
        return {name: value for name, value in tool.items() if name != "type" and value is not None}
    if kind == "local_shell":
        return {"description": "Runs a command on the user's machine.", "parameters": _SHELL_SCHEMA}
    format = tool.get("format")
    texts = [tool["description"]] if isinstance(tool.get("description"), str) else []
    if isinstance(format, Mapping) and format.get("type") == "grammar":
        texts.append(f"The input follows this {format.get('syntax')} grammar:\n{format.get('definition')}")
    return {"description": "\n\n".join(texts), "parameters": _INPUT_SCHEMA}


def _custom_input(arguments: str) -> str:
    """Return the property `input`, or all arguments in another format."""
    found = read_object(arguments) or {}
    return found[INPUT] if len(found) == 1 and isinstance(found.get(INPUT), str) else arguments


def _shell_action(arguments: str) -> JsonObject | None:
    """Return None if the arguments do not contain an action."""
    found = read_object(arguments) or {}
    command, timeout_ms, folder = (found.get(name) for name in ("command", "timeout_ms", "working_directory"))
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return None
    return {
        "type": "exec",
        "command": command,
        "env": {},
        "timeout_ms": timeout_ms if isinstance(timeout_ms, int) else None,
        "user": None,
        "working_directory": folder if isinstance(folder, str) else None,
    }
