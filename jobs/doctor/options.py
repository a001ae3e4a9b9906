"""Options of `manta doctor`; its flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...cluster.flag import Flag

SHIPPED_PAIR = ("models/target", "models/drafter")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of `manta doctor`.

    Attributes:
        model: target checkpoint: folder or hub id.
        spec_model: drafter checkpoint: folder or hub id.
        quick: use fewer dtypes, prompts and tokens, to finish within a minute.
        output: JSON file for the report.
    """

    model: Annotated[str, Flag("-m")] = SHIPPED_PAIR[0]
    spec_model: str = SHIPPED_PAIR[1]
    quick: bool = False
    output: Annotated[Path | None, Flag("-o")] = None
