"""Dispatches functions between an AMX variant and a SIMD variant.

The variant is chosen when Numba compiles a caller, on the machine that will run it. Importing this queries
nothing, and compiled code holds one variant; the on-disk cache is keyed by it
(`compute/cpu_numba/element_ops.py`). Used by the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import overload

from ...cpu_numba.cpu_features import Instructions, bf16_instructions


def has_tiles() -> bool:
    return bf16_instructions() is Instructions.AMX


@overload(has_tiles)
def _has_tiles():
    found = has_tiles()
    return lambda: found


def of_two_kinds(name: Callable[..., Any], tiles: Callable[..., Any], rows: Callable[..., Any]) -> None:
    """Make Numba replace calls of `name` by `tiles` or `rows`, chosen when the call is compiled."""

    def choose(*types_of_args: Any) -> Callable[..., Any]:
        return tiles if has_tiles() else rows

    # Not strict, because `choose` accepts any arguments; both variants have the parameters of `name`.
    overload(name, strict=False, jit_options={"error_model": "numpy"})(choose)
