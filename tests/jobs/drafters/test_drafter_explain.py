"""`manta drafter explain`: each of eight seeded causes is named first, on the shipped pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manta.jobs.cli import app
from support.checkpoints.low_acceptance_pairs import MAX_TOKENS, SEEDS, Seed, write_card
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_card(tmp_path_factory.mktemp("card"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.cause)
def test_the_seeded_cause_is_named_first(seed: Seed, card: Path, tmp_path: Path) -> None:
    drafter, target, data = seed.make(tmp_path)
    words = ["explain", drafter, "--target", target, "--data", data, "--card", card]
    done = CliRunner().invoke(
        app, ["drafter", *map(str, words), "--max-tokens", str(MAX_TOKENS), "--json"], catch_exceptions=False
    )
    found = json.loads(done.output[done.output.index("{\n") :])
    causes = [each["cause"] for each in found["causes"]]
    assert causes and causes[0] == seed.cause, found["causes"]
    assert found["causes"][0]["lost_share"] > 0.1
    if seed.cause == "wrong taps":
        assert "[1, 4, 8, 12, 15]" in found["causes"][0]["evidence"]
