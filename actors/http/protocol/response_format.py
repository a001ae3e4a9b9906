"""`response_format` (OpenAI's) and `structured_outputs` (vLLM's), of which a request may have one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ....cluster.errors import RequestError
from ....cluster.request.structured_outputs import CONSTRAINTS, StructuredOutputsParams


class JsonSchemaFormat(BaseModel):
    """A schema and its name. The answer follows the schema with or without `strict`."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")  # Any: JSON
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's field. Structural tags have `structures` and `triggers` in addition to `type`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") == (self.json_schema is None):
            needs = "needs" if self.type == "json_schema" else "takes no"
            raise RequestError(
                f'response_format: type "{self.type}" {needs} json_schema.',
                param="response_format.json_schema",
            )
        return self

    def constraint(self) -> StructuredOutputsParams | None:
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True, sent_as="response_format")
        if self.json_schema is not None:
            schema = self.json_schema.json_schema
            return StructuredOutputsParams(json=schema, sent_as="response_format.json_schema.schema")
        if self.type == "structural_tag":
            return StructuredOutputsParams(structural_tag=self.model_extra or {}, sent_as="response_format")
        return None


class StructuredOutputs(BaseModel):
    """vLLM's field; see `StructuredOutputsParams`."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")  # Any: JSON
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None  # Any: JSON
    disable_any_whitespace: bool = False

    def constraint(self) -> StructuredOutputsParams | None:
        fields = self.model_dump(by_alias=True)
        if not fields["json_object"]:
            del fields["json_object"]
        is_used = any(fields.get(name) is not None for name in CONSTRAINTS)
        return StructuredOutputsParams(**fields) if is_used else None


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """Raises RequestError if both fields have a constraint."""
    constraint = [each.constraint() for each in (response_format, structured_outputs) if each is not None]
    wanted = [each for each in constraint if each is not None]
    if len(wanted) == 2:
        raise RequestError(
            "structured_outputs and response_format both constrain the answer. Send one of them.",
            param="structured_outputs",
        )
    return wanted[0] if wanted else None
