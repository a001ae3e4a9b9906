"""The tools of /v1/messages that a client runs, as functions of a chat.

Besides tools with a schema of their own these are the ones that Anthropic defines by a type and clients run:
bash, the text editor and the memory. Their parameters are those of Anthropic's documentation, because the
client reads the calls. Tools that Anthropic's servers run are refused, and so are those that answer with
pictures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from ....cluster.errors import RequestError, brief
from ..wire.json_io import JsonObject
from ..wire.request_model import RequestModel, without_nulls

_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_RANGE = {"type": "array", "items": _INTEGER, "description": "First and last line, from 1; -1 is the end."}
_VIEW = ("view", ["path"], {"path": _STRING, "view_range": _RANGE})
_CREATE = ("create", ["path", "file_text"], {"path": _STRING, "file_text": _STRING})
_REPLACE = ("str_replace", ["path", "old_str"], {"path": _STRING, "old_str": _STRING, "new_str": _STRING})
_BASH = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command. Required unless `restart` is true."},
        "restart": {"type": "boolean", "description": "Restart the shell instead of running a command."},
    },
    "additionalProperties": False,
}


def _insert(text: str) -> tuple[str, list[str], JsonObject]:
    fields = {"path": _STRING, "insert_line": _INTEGER, text: _STRING}
    return "insert", [*fields], fields


def _commands(*commands: tuple[str, list[str], JsonObject]) -> JsonObject:
    """Return the schema of a tool with commands. `commands`: name, required fields and fields of each."""
    needs = "; ".join(f"{name}: {', '.join(required)}" for name, required, _ in commands)
    command = {
        "type": "string",
        "enum": [name for name, _, _ in commands],
        "description": f"What each command needs: {needs}.",
    }
    properties = {name: schema for _, _, fields in commands for name, schema in fields.items()}
    shared = [name for name in properties if all(name in required for _, required, _ in commands)]
    return {
        "type": "object",
        "properties": {"command": command, **properties},
        "required": ["command", *shared],
        "additionalProperties": False,
    }


_EDIT = "Views, creates and edits text files. `insert_line` is the line after which text is inserted."
_OLD_EDITOR = (_EDIT, _commands(_VIEW, _CREATE, _REPLACE, _insert("new_str"), ("undo_edit", ["path"], {})))
_EDITOR = (_EDIT, _commands(_VIEW, _CREATE, _REPLACE, _insert("insert_text")))
_MEMORY = (
    "Views and edits files in /memories, which are kept between conversations. View /memories first.",
    _commands(
        _VIEW,
        _CREATE,
        _REPLACE,
        _insert("insert_text"),
        ("delete", ["path"], {"path": _STRING}),
        ("rename", ["old_path", "new_path"], {"old_path": _STRING, "new_path": _STRING}),
    ),
)
# Type of a tool, the newest last -> its name, description and schema.
CLIENT_TOOLS: Mapping[str, tuple[str, str, JsonObject]] = {
    r"bash_\d+": ("bash", "Runs commands in a shell on the user's machine, which keeps its state.", _BASH),
    r"text_editor_(20241022|20250124)": ("str_replace_editor", *_OLD_EDITOR),
    r"text_editor_\d+": ("str_replace_based_edit_tool", *_EDITOR),
    r"memory_\d+": ("memory", *_MEMORY),
}


# Any: a validator sees raw JSON.
def own_tool(value: Any) -> Any:
    """Return a tool with its schema, also one that Anthropic defines. Raises RequestError for others."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is None or kind == "custom":
        return value
    for pattern, (name, description, schema) in CLIENT_TOOLS.items():
        if re.fullmatch(pattern, str(kind)):
            return {"name": name, "description": description, "input_schema": schema, **value}
    raise RequestError(
        f"tools: a tool of type {brief(kind)} is run by Anthropic's servers, or answers with pictures. Send "
        "tools with a name and an input_schema, or bash, text_editor or memory tools; the client runs them.",
        param="tools",
    )


class AnthropicTool(RequestModel):
    unread = ("type", "cache_control", "max_characters")

    name: str
    description: str | None = None
    input_schema: Annotated[dict[str, Any], BeforeValidator(without_nulls)]
    strict: bool | None = None
    eager_input_streaming: bool | None = None

    def for_chat(self) -> JsonObject:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function |= {"strict": self.strict}
        return {
            "type": "function",
            "function": {name: value for name, value in function.items() if value is not None},
        }
