"""Values of a label that strangers choose: a bounded number of them, each short, and one for all others.

A series lives as long as its process and costs whoever stores it, and a place that is taken stays taken: to
give it to another would make a counter fall. So only names that are configured get one (`allowed`), and where
any name may, the first do. Used by `actors/telemetry.py` and `actors/receipts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

NONE, OTHER = "none", "other"
ANY = "*"  # among names that are configured: any name
_FITS = re.compile(r"[\w.:@/+-]{1,64}")


def is_label(name: str) -> bool:
    """Whether a name can be the value of a label, and is not one of ours."""
    return _FITS.fullmatch(name) is not None and name not in (NONE, OTHER)


class Account(NamedTuple):
    """For whom a request is, of as many values as are told apart."""

    tenant: str = NONE
    category: str = NONE


class LabelValues:
    """The values of one label.

    Args:
        most: different ones, beside NONE and OTHER.
        allowed: names that may get a place; ANY for all.
    """

    def __init__(self, most: int, allowed: Sequence[str] = (ANY,)) -> None:
        self._most = most
        self._allowed = None if ANY in allowed else frozenset(allowed)
        self._known: set[str] = set()

    def of(self, asked: str | None) -> str:
        """What stands for it: itself, if it fits and has or gets a place."""
        if asked is None:
            return NONE
        if asked in self._known:
            return asked
        if len(self._known) == self._most or not is_label(asked):
            return OTHER
        if self._allowed is not None and asked not in self._allowed:
            return OTHER
        self._known.add(asked)
        return asked
