"""The short form of `make kv-tier`: sessions that the cache does not hold, and engines that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trials.kv_tier import Sessions, compare_sessions, kill_engines, read_tokens, settings_of, split


@pytest.fixture
def settings(shipped_pair: tuple[Path, Path]) -> dict[str, Any]:
    eager = {"dtype": "float32", "attention_backend": "torch", "num_threads": 1}
    return settings_of(*map(str, shipped_pair)) | eager


def test_twice_as_many_sessions_as_the_cache_holds_compute_a_third_of_their_prompts(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    savings = compare_sessions(settings, Sessions(8, 4, prompt_tokens=256, turns=5), tmp_path / "tier")
    assert savings.held, savings


def test_engines_killed_while_they_save_and_read_pages_answer_as_without_a_tier(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    prompts = split(read_tokens(settings["model"], 6 * 200), 200)
    deaths = kill_engines(settings, prompts, 3, tmp_path / "tier")
    assert deaths.held and deaths.kills == 4, deaths
