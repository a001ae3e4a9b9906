"""Bounded sets of label values that clients choose, with one value for all others.

A time series exists as long as its process and costs memory wherever it is stored, and a value keeps its
place, as reassigning it would make a counter fall. So only configured names get a place (`allowed`); if any
name may, the first ones do. Used by `actors/observability/telemetry.py` and
`actors/observability/usage_store.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

NONE, OTHER = "none", "other"
ANY = "*"  # in a list of configured names: any name
_FITS = re.compile(r"[\w.:@/+-]{1,64}")


def is_label(name: str) -> bool:
    """Return whether a name is valid as a label's value and is not reserved."""
    return _FITS.fullmatch(name) is not None and name not in (NONE, OTHER)


class UsageAccount(NamedTuple):
    """The tenant and category that a request counts for."""

    tenant: str = NONE
    category: str = NONE


class BoundedLabels:
    """The values of one label: at most `maximum` besides NONE and OTHER, of `allowed` names (ANY for all)."""

    def __init__(self, maximum: int, allowed: Sequence[str] = (ANY,)) -> None:
        self._most = maximum
        self._allowed = None if ANY in allowed else frozenset(allowed)
        self._known: set[str] = set()

    def of(self, name: str | None) -> str:
        """Return the name if it is valid and has or gets a place, else OTHER."""
        if name is None:
            return NONE
        if name in self._known:
            return name
        if len(self._known) == self._most or not is_label(name):
            return OTHER
        if self._allowed is not None and name not in self._allowed:
            return OTHER
        self._known.add(name)
        return name
