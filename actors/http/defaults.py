"""What a checkpoint's `generation_config.json` says about requests that leave something open."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...cluster.errors import CheckpointError

DEFAULT_MAX_TOKENS = 256  # of commands and of rows of a dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Defaults of the checkpoint; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"generation_config: {path} is not valid JSON ({error}). Mend it, or set "
                "generation_config: openai to do without it.",
                param="generation_config",
            ) from error
        return cls(
            temperature=found.get("temperature"),
            top_p=found.get("top_p"),
            top_k=found.get("top_k"),
            min_p=found.get("min_p"),
            repetition_penalty=found.get("repetition_penalty"),
            max_tokens=found.get("max_new_tokens"),
        )
