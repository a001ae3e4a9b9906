"""The sanitizer of kernels (`support/kernels/sanitizer.py`) finds planted faults and missing barriers.

Tests that are marked `sanitized` run their kernels under it; `make sanitize` does so with all kernel tests.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.devices import ON_GPU
from support.paths import ROOT, TESTS

pytest.importorskip("triton")
if ON_GPU:
    pytest.skip("a GPU runs no sanitizer", allow_module_level=True)

import triton
import triton.language as tl
from support.kernels.sanitizer import Sanitizer

N = 16
KERNELS = ("drafter/compute/gpu_triton", "drafter/step/gpu_triton")
# Words of tests by file; together they run every barrier and ordering atomic of a launch.
ORDERED = {
    "drafter/compute/test_delta_net.py": "no_bit_of_a_row",
    "drafter/compute/test_draft_trees.py": "moves_of_a_request",
    "drafter/gpu_triton/test_kernels_attention.py": "ragged_rows or invariant_mode_splits",
    "drafter/gpu_triton/test_kernels_products.py": "splits_are_added",
    "drafter/gpu_triton/test_kernels_sampling.py": "greedy_and_noisy or filter_floors",
    "drafter/gpu_triton/test_kernels_trimming.py": "on_the_host",
    "drafter/step/test_kernels_trees.py": "hosts or most_valuable_nodes",
}
# It orders launches of several ranks: `test_kernels_compile.py` finds the barriers beside its atomics.
OF_RANKS = "drafter/compute/gpu_triton/linear/all_reduce_norm.py"


@triton.jit
def _reverse(x, y, HAS_BARRIER: tl.constexpr, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(x + places, tl.load(y + places))
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(y + places, tl.load(x + N - 1 - places))


@triton.jit
def _add_up(
    x, y, count, HAS_BARRIER: tl.constexpr, SEM: tl.constexpr, N: tl.constexpr, PROGRAMS: tl.constexpr = 3
):  # fmt: skip
    """The last program adds up what all have stored."""
    program, places = tl.program_id(0), tl.arange(0, N)
    tl.store(x + program * N + places, places)
    if HAS_BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(count, 1, sem=SEM) == PROGRAMS - 1:
        tl.store(count, 0)
        total = tl.zeros((N,), dtype=tl.int32)
        for other in range(0, PROGRAMS):
            total += tl.load(x + other * N + places)
        tl.store(y + places, total)


@triton.jit
def _shift(x, y, by, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(y + places, tl.load(x + places + by))


@triton.jit
def _copy_to_all(x, y, STRIDE: tl.constexpr, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(y + tl.program_id(0) * STRIDE + places // 2, tl.load(x + places))


def ints(count: int = 4 * N) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


CASES: dict[str, tuple[Callable[[], Any], str | None]] = {
    "a barrier between two threads": (lambda: _reverse[(1,)](ints(), ints(), True, N), None),
    "no barrier": (lambda: _reverse[(1,)](ints(), ints(), False, N), "with no barrier between them"),
    "counted after a barrier": (lambda: _add_up[(3,)](ints(), ints(), ints(1), True, "acq_rel", N), None),
    "counted before": (lambda: _add_up[(3,)](ints(), ints(), ints(1), False, "acq_rel", N), "no atomic"),
    "counted relaxed": (lambda: _add_up[(3,)](ints(), ints(), ints(1), True, "relaxed", N), "no atomic"),
    "only released": (lambda: _add_up[(3,)](ints(), ints(), ints(1), True, "release", N), "no atomic"),
    "within": (lambda: _shift[(1,)](ints(N + 3), ints(N), 3, N), None),
    "beyond": (lambda: _shift[(1,)](ints(N + 3), ints(N), 4, N), "a load of 1 elements out of bounds"),
    "before": (lambda: _shift[(1,)](ints(N), ints(N), -2, N), "a load of 2 elements out of bounds"),
    "threads": (lambda: _copy_to_all[(1,)](ints(), ints(), N, N), "a store of several elements"),
    "programs": (lambda: _copy_to_all[(2,)](ints(), ints(), 0, N), "a store at"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_planted_faults_are_found(case: str) -> None:
    launch, words = CASES[case]
    sanitizer = Sanitizer()
    with sanitizer.installed():
        launch()
    assert any(words in each for each in sanitizer.findings) if words else not sanitizer.findings


def test_a_barrier_and_an_order_that_are_taken_away_are_missed() -> None:
    sanitizer = Sanitizer(mutate=True)
    with sanitizer.installed():
        _add_up[(3,)](ints(), ints(), ints(1), True, "acq_rel", N)
    assert list(sanitizer.needed.values()) == [True, True]


def ordering_lines() -> Iterator[tuple[str, int]]:
    """Yield the lines of all barriers and ordering atomics of the kernels."""
    for path in sorted(path for folder in KERNELS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (
                ast.unparse(node.func) == "tl.debug_barrier"
                or any(each.arg == "sem" for each in node.keywords)
            ):
                yield str(path.relative_to(ROOT)), node.lineno


@pytest.mark.if_changed
def test_every_barrier_and_order_is_needed(tmp_path: Path) -> None:
    """Left out one at a time: values are right in the interpreter, and the sanitizer finds a fault."""
    orders = tmp_path / "orders.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        " or ".join(ORDERED.values()),
    ]
    done = subprocess.run(
        [*command, *(TESTS / file for file in ORDERED)],
        env={**os.environ, "MANTA_SANITIZE": "1", "MANTA_ORDERS": str(orders), "MANTA_GRID": "short"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    ran = [json.loads(line) for line in orders.read_text().splitlines()]
    needed = {(file, line) for file, line, is_needed in ran if is_needed}
    assert {each for each in ordering_lines() if each[0] != OF_RANKS} == needed
