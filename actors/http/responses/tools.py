"""Converts tools of /v1/responses to functions of a chat, and calls of those functions to items of this API.

Types other than functions that the client runs become functions: the tools of a namespace, custom tools
(which take one string), the local shell, the shell and `apply_patch`. Tools that OpenAI's servers run are
left out, also the shell in a container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....cluster.errors import RequestError, brief
from ...tokenization.client_messages import read_object
from ..wire.json_io import JsonObject

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch"]
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


_COMMANDS_SCHEMA = {
    "type": "object",
    "properties": {
        "commands": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Command lines, which are run one after the other.",
        },
        "timeout_ms": {"type": "integer"},
        "max_output_length": {"type": "integer", "description": "Characters of output that are returned."},
    },
    "required": ["commands"],
    "additionalProperties": False,
}
_PATCH_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        "path": {"type": "string"},
        "diff": {
            "type": "string",
            "description": "V4A diff without a header: lines begin with +, - or a space, and `@@` marks a "
            "place in the file. A new file has + lines only; delete_file has no diff.",
        },
    },
    "required": ["type", "path"],
    "additionalProperties": False,
}
# Tools without a name, of which a request has one: what the model reads about them, and their parameters.
_BUILT_IN: Mapping[str, tuple[str, JsonObject]] = {
    "local_shell": ("Runs a command on the user's machine.", _SHELL_SCHEMA),
    "shell": ("Runs command lines in a shell on the user's machine.", _COMMANDS_SCHEMA),
    "apply_patch": ("Creates, changes or deletes one of the user's files.", _PATCH_SCHEMA),
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
        if self.kind in _ACTIONS and (action := _ACTIONS[self.kind](read_object(arguments) or {})):
            return {"type": f"{self.kind}_call", "call_id": call_id, **action}
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
        if given.get("type") == "allowed_tools":
            return self._allowed(given)
        if (named := self._named(given)) is not None:
            return named
        raise RequestError(
            f"tool_choice: {brief(given)} is no tool of this request that a client runs. Name a function or "
            "a custom tool of `tools`, or send none, auto or required.",
            param="tool_choice",
        )

    def _allowed(self, given: JsonObject) -> str | JsonObject:
        """Return the choice among some of the tools; those that a server runs are left out."""
        tools = given.get("tools")
        if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
            raise RequestError(
                "tool_choice.tools must be a list of tools, and not empty.", param="tool_choice.tools"
            )
        allowed: list[JsonObject] = []
        for i, tool in enumerate(tools):
            if (named := self._named(tool)) is not None:
                allowed.append(named)
            elif f"tools.{tool.get('type')}" not in self.left_out:
                raise RequestError(
                    f"tool_choice.tools.{i}: {brief(tool)} is no tool of this request.",
                    param=f"tool_choice.tools.{i}",
                )
        if not allowed and given.get("mode") == "auto":
            return "none"
        choice = {"mode": given.get("mode"), "tools": allowed}
        return {"type": "allowed_tools", "allowed_tools": choice}

    def _named(self, given: JsonObject) -> JsonObject | None:
        kind, name, namespace = given.get("type"), given.get("name"), given.get("namespace")
        for tool in self.tools:
            names = (tool.name, tool.function["name"]) if namespace is None else (tool.name,)
            is_named = name in names and namespace in (None, tool.namespace)
            if kind == tool.kind and (is_named or kind in _BUILT_IN):
                return {"type": "function", "function": {"name": tool.function["name"]}}
        return None

    def _read(
        self, given: Sequence[JsonObject], at: str, namespace: str | None = None
    ) -> Iterator[ClientTool]:
        for i, tool in enumerate(given):
            kind, place = tool.get("type"), f"{at}.{i}"
            if kind == "namespace" and namespace is None:
                yield from self._read_namespace(tool, place)
            elif kind in ("function", "custom") or (kind in _BUILT_IN and not _is_hosted(tool)):
                name = kind if kind in _BUILT_IN else tool.get("name")
                flat = flat_name(namespace, name) if isinstance(name, str) else name
                function = {**_function(tool["type"], tool), "name": flat}
                yield ClientTool(tool["type"], name, namespace, function, place)
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


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """Return whether a shell is in a container of OpenAI's servers."""
    environment = tool.get("environment")
    return isinstance(environment, Mapping) and environment.get("type") != "local"


def _function(kind: Kind, tool: Mapping[str, Any]) -> JsonObject:
    if kind == "function":
        return {name: value for name, value in tool.items() if name != "type" and value is not None}
    if kind in _BUILT_IN:
        description, parameters = _BUILT_IN[kind]
        return {"description": description, "parameters": parameters}
    format = tool.get("format")
    texts = [tool["description"]] if isinstance(tool.get("description"), str) else []
    if isinstance(format, Mapping) and format.get("type") == "grammar":
        texts.append(f"The input follows this {format.get('syntax')} grammar:\n{format.get('definition')}")
    return {"description": "\n\n".join(texts), "parameters": _INPUT_SCHEMA}


def _custom_input(arguments: str) -> str:
    """Return the property `input`, or all arguments in another format."""
    found = read_object(arguments) or {}
    return found[INPUT] if len(found) == 1 and isinstance(found.get(INPUT), str) else arguments


# Any below: JSON that the model wrote. Each returns None if it contains no action.
def _local_shell_call(found: Mapping[str, Any]) -> JsonObject | None:
    command, folder = found.get("command"), found.get("working_directory")
    if not _are_strings(command):
        return None
    action = {
        "type": "exec",
        "command": command,
        "env": {},
        "timeout_ms": _integer(found.get("timeout_ms")),
        "user": None,
        "working_directory": folder if isinstance(folder, str) else None,
    }
    return {"action": action}


def _shell_call(found: Mapping[str, Any]) -> JsonObject | None:
    if not _are_strings(found.get("commands")):
        return None
    limits = {name: _integer(found.get(name)) for name in ("timeout_ms", "max_output_length")}
    return {"action": {"commands": found["commands"], **limits}, "environment": {"type": "local"}}


def _apply_patch_call(found: Mapping[str, Any]) -> JsonObject | None:
    kind, path, diff = found.get("type"), found.get("path"), found.get("diff")
    if not isinstance(path, str) or kind not in ("create_file", "update_file", "delete_file"):
        return None
    if kind == "delete_file":
        return {"operation": {"type": kind, "path": path}}
    return {"operation": {"type": kind, "path": path, "diff": diff}} if isinstance(diff, str) else None


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


_ACTIONS: Mapping[str, Callable[[Mapping[str, Any]], JsonObject | None]] = {
    "local_shell": _local_shell_call,
    "shell": _shell_call,
    "apply_patch": _apply_patch_call,
}
