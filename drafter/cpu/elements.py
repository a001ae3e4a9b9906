"""What the compiled loops are made of: addresses as arrays, elements as fp32 values, options of the compiler.

A loop takes addresses and sizes, for turning tensors into NumPy's arrays costs as much as the work; a value
`like` says of which type the elements are. NumPy has no bfloat16: its bits travel as uint16. Loops are
compiled when they are first called on a machine and kept on the disk, beside their file or where
NUMBA_CACHE_DIR says.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import intrinsic, overload

LIKE = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}


def _loop(
    fastmath: set[str], inline: str = "never"
) -> Callable[[Callable[..., Any]], Any]:  # Any: Numba's own
    """A decorator: compiles a function when it is first called, with these freedoms of floating-point."""

    def compiled(function: Callable[..., Any]) -> Any:
        options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath, "inline": inline}
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # there is no folder to keep it in: every process compiles anew
            return njit(**options)(function)

    return compiled


# A sum may be taken in any order (the same for every row); nothing else may be reordered. A maximum is one of
# its values in any order, but for NaNs, which it may skip.
elements = _loop({"contract"})
inlined = _loop({"contract"}, inline="always")  # into a loop that must be vectorised
sums = _loop({"reassoc", "nsz", "contract"})
maxima = _loop({"reassoc", "nsz", "nnan"})


@intrinsic
def pointer(context, address, like):
    """The address as a pointer to elements of the type of `like`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


def float_of(element):
    """fp32 of an element; for NaNs and infinities too."""


def rounded(value, like):
    """The fp32 value as an element of the type of `like`, to nearest even."""


@overload(float_of)
def _float_of(element):
    if isinstance(element, types.Integer):
        return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    return lambda element: element


@overload(rounded)
def _rounded_to(value, like):
    def round_bits(value, like):
        bits = np.float32(value).view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(nearest if value == value else 0x7FC0)

    return round_bits if isinstance(like, types.Integer) else lambda value, like: np.float32(value)
