"""Counts the kernels that Triton compiles, at a second or more for each; later starts find them on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs


@dataclass
class Compilations:
    num_kernels: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.num_kernels > 0

    def __str__(self) -> str:
        found = f"Triton compiled {self.num_kernels} kernels in {self.seconds:.0f} s"
        return f"{found}; later starts find them in {knobs.cache.dir}, and all that `manta compile` put there"


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count what is compiled and not found on disk."""
    found, listener = Compilations(), knobs.compilation.listener

    def count(**compilation: Any) -> None:
        if listener is not None:
            listener(**compilation)
        if not compilation["cache_hit"]:
            found.num_kernels += 1
            found.seconds += compilation["times"].total / 1e6

    knobs.compilation.listener = count
    try:
        yield found
    finally:
        knobs.compilation.listener = listener
