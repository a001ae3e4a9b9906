"""A finding of `manta drafter validate`: the checks make them, `validate_pair.py` collects them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """An error or a warning about a drafter and target.

    Attributes:
        what: the field, file or tensor.
        message: the value and what to change.
        fatal: the engine refuses the pair, or its drafts are useless.
    """

    what: str
    message: str
    fatal: bool

    def as_json(self) -> dict[str, Any]:  # Any: JSON values
        return dataclasses.asdict(self)


def fatal(what: str, message: str) -> Incompatibility:
    return Incompatibility(what, message, fatal=True)


def warning(what: str, message: str) -> Incompatibility:
    return Incompatibility(what, message, fatal=False)
