"""The tools of a conversation in OpenAI's format: functions, and which of them must be called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ....cluster.errors import RequestError, brief

TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
MAX_TOOLS = 512


class FunctionTool(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema of its arguments (Any: JSON)."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """An entry of `tools`; functions are the only type."""

    type: Literal["function"] = "function"
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True)}


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    """A `tool_choice` that names one function, which must then be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ToolOptions(BaseModel):
    """Fields about tools of requests that take messages.

    Attributes:
        tools: functions that the model may call.
        tool_choice: none, auto (the model's choice), required, or one function by name.
        parallel_tool_calls: false: at most one call.
    """

    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> ToolOptions:
        names = [tool.function.name for tool in self.tools or ()]
        for at, name in enumerate(names):
            if name in names[:at]:
                raise RequestError(
                    f"tools.{at}.function.name: {brief(name)} is the name of another tool, too.",
                    param=f"tools.{at}.function.name",
                )
        choice = self.tool_choice
        if not names and not (choice is None or choice in ("none", "auto")):
            raise RequestError("tool_choice needs tools: send some, or leave it out.", param="tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise RequestError(
                f"tool_choice.function.name: {brief(choice.function.name)} is no tool. Tools: "
                f"{', '.join(map(brief, names))}.",
                param="tool_choice.function.name",
            )
        return self

    @property
    def choice(self) -> Literal["none", "auto", "required"]:
        """Whether tools may or must be called; a named one must be."""
        if not self.tools or self.tool_choice == "none":
            return "none"
        return "auto" if self.tool_choice in (None, "auto") else "required"

    @property
    def available_tools(self) -> list[FunctionTool]:
        if self.choice == "none":
            return []
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            return [each for each in functions if each.name == self.tool_choice.function.name]
        return functions

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        return {each.name: each.parameters or {} for each in self.available_tools}
