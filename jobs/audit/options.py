"""Options of `manta audit`; its flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...cluster.flag import Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Options of `manta audit`.

    Attributes:
        prompts: JSONL with `prompt` or `messages`.
        num_prompts: number of prompts, taken evenly from the file; by default all.
        max_tokens: tokens of every answer.
        temperatures: sampling temperature; 0 is greedy; may be repeated. Each prompt is answered at each of
            them, with its index as the seed.
        output: JSON file for the certificate.
    """

    prompts: Annotated[Path, Flag("--prompts -i")] = Path("models/prompts.jsonl")
    num_prompts: Annotated[int | None, Flag(least=1)] = None
    max_tokens: Annotated[int, Flag(least=1)] = 128
    temperatures: Annotated[tuple[float, ...], Flag("--temperature -t", least=0.0)] = (0.0, 0.7, 1.0)
    output: Annotated[Path | None, Flag("-o")] = None
