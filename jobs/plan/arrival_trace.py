"""Reads a trace: a JSON object per line, {"arrival_s": 0.4, "prompt_tokens": 812, "output_tokens": 240}."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...cluster.errors import DatasetError
from ...cluster.simulation.trace_replay import TraceArrival


class _Line(BaseModel):
    """A line of a trace. Other keys are ignored, so that logs can be used as traces."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    arrival_s: float = Field(ge=0)
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)


def read_trace(path: Path, max_model_len: int) -> list[TraceArrival]:
    """Read all arrivals; DatasetError names a line that is invalid or longer than `max_model_len`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"trace: {path} cannot be read: {error}.", param="trace") from None
    trace = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not trace:
        raise DatasetError(f"trace: {path} has no arrivals. Give at least one line.", param="trace")
    for number, arrival in enumerate(trace, 1):
        length = arrival.prompt_tokens + arrival.output_tokens
        if length > max_model_len:
            raise DatasetError(
                f"trace: arrival {number} of {path} is {length} tokens long, and max_model_len "
                f"is {max_model_len}. Raise --max-model-len, or remove such lines.",
                param="trace",
            )
    return trace


def _parse(line: str, where: str) -> TraceArrival:
    try:
        return TraceArrival(**_Line.model_validate_json(line).model_dump())
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        key = ".".join(map(str, found["loc"])) or "the line"
        raise DatasetError(
            f"trace: {where}: {key}: {found['msg']}. Write lines like "
            '{"arrival_s": 0.4, "prompt_tokens": 812, "output_tokens": 240}.',
            param="trace",
        ) from None
