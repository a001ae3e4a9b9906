"""Functions of two kinds by one name: for CPUs with AMX's tiles, and for those whose products go by rows.

Which kind is settled when a caller is compiled, on the machine that will run it. Importing this asks nothing,
and a pass asks nothing either: its code has one kind in it, and is kept on the disk by what was chosen
(`compute/cpu_numba/element_ops.py`). Used by the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import overload

from ..cpu_numba.cpu_features import Instructions, bf16_instructions


def has_tiles() -> bool:
    """Whether products run in AMX's tiles."""
    return bf16_instructions() is Instructions.AMX


def of_two_kinds(name: Callable[..., Any], tiles: Callable[..., Any], rows: Callable[..., Any]) -> None:
    """What Numba puts in the place of a name: it asks when it compiles a call of it."""

    def choose(*types_of_args: Any) -> Callable[..., Any]:
        return tiles if has_tiles() else rows

    # Not strict: both have the name's parameters, `choose` takes any.
    overload(name, strict=False, jit_options={"error_model": "numpy"})(choose)
