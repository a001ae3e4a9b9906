"""Building blocks of compiled loops: addresses as arrays, elements as fp32, compiler options.

A loop takes addresses and sizes, since converting tensors to NumPy arrays costs as much as the work; a value
`like` carries the element type. NumPy has no bfloat16, so its bits are uint16. Loops are compiled when first
called on a machine and cached on disk, next to their file or in NUMBA_CACHE_DIR; declaring one reads and
writes nothing.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportReturnType=false, reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic, overload

from .cpu_features import bf16_instructions, mask_numba

mask_numba()
LIKE = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
_NUMBERS = (int, float, np.number)


class _CodeCache:
    """Numba's on-disk cache of a function's code, opened when the function is first called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def _store(self) -> Any:  # Any: Numba's own, here and below
        try:
            store = FunctionCache(self._function)
        except RuntimeError:  # no writable cache folder: every process compiles
            return NullCache()
        # One file per kind of instructions, or processes of two kinds would overwrite each other's.
        name = f"{store._impl.filename_base}.{bf16_instructions()}"
        store._cache_file = IndexDataCacheFile(store.cache_path, name, _age(self._function))
        return store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _age(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return what the cache key of compiled code has beside the function's bytecode, which Numba checks.

    The sources of the loop's folder with its subfolders and of this one, and numeric constants that their
    modules import.
    """
    folders = {Path(function.__code__.co_filename).parent, Path(__file__).parent}
    constants = sorted((k, v) for names in _globals(function) for k, v in names.items() if _is_number(v))
    return *sorted(_hash(folder) for folder in folders), repr(constants), str(bf16_instructions())


def _globals(function: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return the globals of its module, of the modules of the loops it calls, and so on."""
    found: dict[str, dict[str, Any]] = {}
    left = [function]
    while left:
        one = left.pop()
        if one.__module__ not in found:
            found[one.__module__] = one.__globals__
            left += [value.py_func for value in one.__globals__.values() if hasattr(value, "py_func")]
    return list(found.values())


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBERS)


@cache
def _hash(folder: Path) -> str:
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()


def _with_code_cache(compiled: Any) -> Any:
    compiled._cache = _CodeCache(getattr(compiled, "py_func", None) or compiled.__wrapped__)
    return compiled


_OPTIONS = {"nogil": True, "error_model": "numpy"}


def _loop(fastmath: set[str], inline: str = "never") -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function on first call with these fast-math flags."""
    return lambda function: _with_code_cache(njit(**_OPTIONS, fastmath=fastmath, inline=inline)(function))


class Task:
    """A function of (args, thread, num_threads) for `thread_team.run`; compiled when its address is read."""

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        self._code = _with_code_cache(CFunc(function, ((types.int64,) * 3, types.void), {}, _OPTIONS))

    @cached_property
    def address(self) -> int:
        # A second compilation would free the first one's code, which another thread may run already.
        with global_compiler_lock:
            if self._code.address is None:
                self._code.compile()
            return self._code.address


exact = _loop(set())  # no reordering or fusion: each operation is rounded as written
# A sum may be taken in any order (the same for every row); nothing else may be reordered.
elements = _loop({"contract"})
inlined = _loop({"contract"}, inline="always")  # into a loop that must be vectorized
sums = _loop({"reassoc", "nsz", "contract"})


@intrinsic
def pointer(context, address, like):
    """Return the address as a pointer to elements of the type of `like`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


@intrinsic
def _void_pointer(context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@inlined
def records(address, count, dtype):
    """Return the array of `count` structures at an address; `dtype` is a constant."""
    return carray(_void_pointer(address), (count,), dtype)


def record_dtype(words: str, *floats: str) -> np.dtype:
    """Return a structure dtype of int64 addresses and sizes, then fp32 fields."""
    integers = [(name, np.int64) for name in words.split()]
    return np.dtype([*integers, *((name, np.float32) for name in floats)])


def float_of(element):
    """Return an element as fp32, including NaNs and infinities."""


def size_of(like):
    """Return the size in bytes of an element of the type of `like`."""


def finite_or_zero(element):
    """Return the element; 0 for NaN and infinities."""


def rounded(value, like):
    """Round the fp32 value to nearest even, as an element of the type of `like`."""


@overload(float_of)
def _float_of(element):
    if isinstance(element, types.Integer):
        return lambda element: np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    return lambda element: element


@overload(finite_or_zero)
def _sound(element):
    if isinstance(element, types.Integer):
        mask = np.uint16(0x7F80)
        return lambda element: element if element & mask != mask else np.uint16(0)
    bits = np.uint32(0x7F800000)
    return lambda element: element if np.float32(element).view(np.uint32) & bits != bits else np.float32(0)


@overload(rounded)
def _rounded_to(value, like):
    def round_bits(value, like):
        bits = np.float32(value).view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(nearest if value == value else 0x7FC0)

    return round_bits if isinstance(like, types.Integer) else lambda value, like: np.float32(value)


@overload(size_of)
def _size_of(like):
    size = like.bitwidth // 8
    return lambda like: size
