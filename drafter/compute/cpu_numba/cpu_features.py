"""Which instructions compute bf16 on this CPU, and leave to use them.

AMX's registers are given to a process only on request (Linux's `arch_prctl`), which is made when a backend is
chosen or code is compiled or read from the disk, never by an import. Asked by `cpu_fused/` and
`element_ops.py`.

MANTA_CPU_INSTRUCTIONS names the best kind that may be used, for tests and measurements of what other machines
have. It is read before Numba compiles anything; Numba's own NUMBA_CPU_FEATURES goes before it. What oneDNN
may use is ONEDNN_MAX_CPU_ISA's, before PyTorch is imported.
"""

# Numba makes its settings from a table.
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
    """How bf16 is multiplied, the best first; sums differ in their last bits."""

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
# What the names of features begin with that a kind has beyond the next one.
_BEYOND = {
    Instructions.AVX512_BF16: ("amx",),
    Instructions.AVX512: ("amx", "avx512bf16", "avx512fp16", "avx10"),
    Instructions.AVX2: ("amx", "avx512", "avx10", "evex512"),
}


@cache
def bf16_instructions() -> Instructions | None:
    """The best that Numba may compile for and the system lets us use; None: leave products to oneDNN."""
    return next(iter(all_instructions()), None)


def all_instructions() -> list[Instructions]:
    """All kinds that the variable may name here."""
    features, kinds = _features(), list(Instructions)
    return [
        kind
        for kind in kinds[kinds.index(_most()) :]
        if _NEEDS[kind] <= features and (kind is not Instructions.AMX or _may_use_tiles())
    ]


def mask_numba() -> None:
    """Keep Numba, too, from what MANTA_CPU_INSTRUCTIONS excludes; before it compiles anything."""
    hidden = _BEYOND.get(_most())
    if hidden is None or config.CPU_FEATURES is not None:
        return
    config.CPU_NAME = binding.get_host_cpu_name()
    config.CPU_FEATURES = ",".join(
        f"{'+' if has and not name.startswith(hidden) else '-'}{name}"
        for name, has in binding.get_host_cpu_features().items()
    )


def _most() -> Instructions:
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
    """As Numba sees them: NUMBA_CPU_FEATURES goes before what the CPU says."""
    if sys.platform != "linux":  # the team's threads sleep in Linux's kernel
        return set()
    if platform.machine() == "aarch64":
        return {"neon"}  # every such CPU has it
    if platform.machine() != "x86_64":
        return set()
    stated = os.environ.get("NUMBA_CPU_FEATURES")
    if stated is not None:
        return {name[1:] for name in stated.split(",") if name.startswith("+")}
    return {name for name, has in binding.get_host_cpu_features().items() if has}


def _may_use_tiles() -> bool:
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
