"""Detects which instructions compute bf16 on this CPU, and requests permission to use them.

Linux grants a process AMX's registers only on request (`arch_prctl` ARCH_REQ_XCOMP_PERM), which is made when
a backend is chosen or code is compiled or read from disk, never by an import.

MANTA_CPU_INSTRUCTIONS names the best kind that may be used, to test and measure as on other machines. It is
read before Numba compiles anything; Numba's own NUMBA_CPU_FEATURES takes precedence. oneDNN obeys
ONEDNN_MAX_CPU_ISA instead, set before PyTorch is imported.
"""

# Numba builds its config attributes dynamically.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import os
import platform
import sys
from enum import Enum
from functools import cache

from llvmlite import binding
from numba.core import config

from ....cluster.errors import ConfigError

VARIABLE = "MANTA_CPU_INSTRUCTIONS"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # x86-64's numbers


class Instructions(Enum):
    """Kinds of bf16 multiplication, best first; sums differ in their last bits."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    NEON = "neon"


_AVX2 = {"avx2", "fma"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_NEEDS = {
    Instructions.AMX: _AVX512 | {"avx512bf16", "amx-tile", "amx-bf16"},
    Instructions.AVX512_BF16: _AVX512 | {"avx512bf16"},
    Instructions.AVX512: _AVX512,
    Instructions.AVX2: _AVX2,
    Instructions.NEON: {"neon"},
}
# Prefixes of the features that a kind excludes.
_BEYOND = {
    Instructions.AVX512_BF16: ("amx",),
    Instructions.AVX512: ("amx", "avx512bf16", "avx512fp16", "avx10"),
    Instructions.AVX2: ("amx", "avx512", "avx10", "evex512"),
}


@cache
def bf16_instructions() -> Instructions | None:
    """Return the fastest kind that Numba may compile for and the system permits; None: use oneDNN."""
    dots = Instructions.AVX512_BF16
    may_dot = _best_allowed() is dots or _has_fast_dots()
    return next((kind for kind in all_instructions() if kind is not dots or may_dot), None)


def all_instructions() -> list[Instructions]:
    """Return all kinds that this CPU and the system support, best first, down from the best allowed one."""
    features, kinds = _features(), list(Instructions)
    return [
        kind
        for kind in kinds[kinds.index(_best_allowed()) :]
        if _NEEDS[kind] <= features and (kind is not Instructions.AMX or _may_use_tiles())
    ]


def mask_numba() -> None:
    """Restrict Numba to MANTA_CPU_INSTRUCTIONS; call before it compiles anything."""
    hidden = _BEYOND.get(_best_allowed())
    if hidden is None or config.CPU_FEATURES is not None:
        return
    config.CPU_NAME = binding.get_host_cpu_name()
    config.CPU_FEATURES = ",".join(
        f"{'+' if has and not name.startswith(hidden) else '-'}{name}"
        for name, has in binding.get_host_cpu_features().items()
    )


def _best_allowed() -> Instructions:
    """Return the kind that MANTA_CPU_INSTRUCTIONS names, by default the best one."""
    name = os.environ.get(VARIABLE)
    if not name:
        return Instructions.AMX
    try:
        return Instructions(name)
    except ValueError:
        names = ", ".join(kind.value for kind in Instructions)
        raise ConfigError(
            f"{VARIABLE}={name!r} is none of {names}. Leave it out to use what there is.", param=VARIABLE
        ) from None


def _features() -> set[str]:
    """Return the CPU's features as Numba sees them: NUMBA_CPU_FEATURES overrides the CPU's."""
    if sys.platform != "linux":  # the team's threads use Linux's futex
        return set()
    if platform.machine() == "aarch64":
        return {"neon"}  # all aarch64 CPUs have it
    if platform.machine() != "x86_64":
        return set()
    stated = os.environ.get("NUMBA_CPU_FEATURES")
    if stated is not None:
        return {name[1:] for name in stated.split(",") if name.startswith("+")}
    return {name for name, has in binding.get_host_cpu_features().items() if has}


def _has_fast_dots() -> bool:
    """Return whether dot products of bf16 are faster than FMAs of fp32: twice as fast on Zen 4 and 5.

    On Intel's cores, which have AMX for bf16, they take three times as long.
    """
    return binding.get_host_cpu_name().startswith("znver")


def _may_use_tiles() -> bool:
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
