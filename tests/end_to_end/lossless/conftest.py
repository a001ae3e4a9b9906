"""Pairs of the losslessness grid, and the tokens that plain decoding gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from support.oracles.lossless_grid import Pair, PairMaker, Reference


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A pair of the grid by its name."""
    return PairMaker(tmp_path_factory.mktemp).make


@pytest.fixture
def pair(request: pytest.FixtureRequest, make_pair: Callable[[str], Pair]) -> Pair:
    """The pair that a test names as an indirect parameter."""
    if "bf16" in request.param and bf16_instructions() is None:
        pytest.skip("this CPU has no products of bf16")
    return make_pair(request.param)


@pytest.fixture(scope="module")
def references() -> dict[tuple[Path, object, object], Reference]:
    """References by what determines the target's tokens."""
    return {}


@pytest.fixture
def reference(pair: Pair, references: dict[tuple[Path, object, object], Reference]) -> Reference:
    return references.setdefault(pair.target_key, Reference(pair))
