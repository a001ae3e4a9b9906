"""Evaluation prompts: the shipped prompts, a downloaded SPEED-Bench, or a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....cluster.errors import DatasetError, RequestError
from ...bench.common.engine_passes import PromptRow, read_rows

_QUICK, _QUICK_PROMPTS = Path("models/prompts.jsonl"), 40
_SPEED_BENCH = Path("speed-bench.jsonl")


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    path: Path
    rows: list[PromptRow]


def open_suite(name: str, num_prompts: int | None = None) -> Suite:
    """Read "quick", "speed-bench" or a JSONL file of prompts, `num_prompts` of them taken evenly."""
    path = {"quick": _QUICK, "speed-bench": _SPEED_BENCH}.get(name, Path(name))
    if not path.is_file():
        remedy = {
            "quick": f"the shipped prompts are not at {path}; run it where models/ is, or give a JSONL file",
            "speed-bench": f"{path} does not exist; make it with `manta bench prepare speed-bench`",
        }.get(name, "must be quick, speed-bench or a JSONL file of prompts")
        raise DatasetError(f"suite={name!r}: {remedy}.", param="suite")
    try:
        rows = read_rows(path, num_prompts or (_QUICK_PROMPTS if name == "quick" else None))
    except RequestError as error:
        raise DatasetError(f"suite={name!r}: {path}: {error.message}", param="suite") from None
    if not rows:
        raise DatasetError(f"suite={name!r} contains no prompt.", param="suite")
    return Suite(path.stem if path == Path(name) else name, path, rows)
