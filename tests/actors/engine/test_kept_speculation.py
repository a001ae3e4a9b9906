"""An engine starts with what the last one on this machine learned, and with no other's data."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from manta import LLM, SamplingParams
from manta.actors.engine import speculation_cache
from manta.cluster.disk_cache import cache_folder
from manta.cluster.speculation.acceptance_model import AcceptanceModel
from manta.cluster.speculation.draft_length_policy import (
    DecodeBatch,
    DraftChoice,
    DraftLengthPolicy,
    draft_lengths,
)
from manta.cluster.speculation.step_cost_model import StepLoad
from support.checkpoints.text_pair import tiny_settings
from support.engines.opened import core_of

PROMPT = {"prompt_token_ids": [1, 5, 9, 20, 21]}
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(autouse=True)
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts find an empty cache, and measure all their steps on a machine of any speed."""
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(speculation_cache, "_MEASURE_S", 300.0)


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step drafts as much as it may, whatever steps cost on this machine."""

    def choose(policy: DraftLengthPolicy, batch: DecodeBatch, load: StepLoad) -> DraftChoice:
        maximum = policy._max_drafts
        return DraftChoice(np.minimum(batch.limits_R, maximum).astype(np.int32), maximum)

    monkeypatch.setattr(DraftLengthPolicy, "choose", choose)


def make(pair: tuple[Path, Path], **settings: object) -> LLM:
    fixed = {"attention_backend": "torch", "skip_tokenizer_init": True}
    return LLM(**tiny_settings(pair, **fixed, **settings))


def learned(llm: LLM) -> tuple[bool, bool]:
    costs, survival = core_of(llm).costs, core_of(llm).acceptance
    assert costs is not None and survival is not None
    return costs.has_measured_drafts, bool((survival.bias_K != AcceptanceModel(15, 1).bias_K[0]).any())


def draft_s(llm: LLM) -> float:
    """Return the predicted seconds of a drafter's pass for one request."""
    assert core_of(llm).costs is not None
    return float(core_of(llm).costs.draft_s(StepLoad(1, 0, 0.0), [3])[0])


def believe(bias: float, draft_s: float = 1e-9) -> None:
    """Save that drafting takes a given time, and that drafts are accepted with sigmoid(bias)."""
    for file in cache_folder().glob("*.json"):
        kept = json.loads(file.read_text())
        value = kept["value"]
        if file.name.startswith("step-costs"):
            value["draft"]["seconds"] = [draft_s for _ in value["draft"]["seconds"]]
        if file.name.startswith("acceptance"):
            value["theta"] = [bias, *(0.0 for _ in value["theta"][1:])]
            value["accepted"] = [9 / (1 + math.exp(-bias)) for _ in value["reached"]]
            value["reached"] = [9.0 for _ in value["reached"]]
        file.write_text(json.dumps(kept))


@pytest.mark.usefixtures("always_drafts")
def test_acceptance_statistics_are_saved_for_the_same_drafter(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(tiny_drafter, drafter)
    with make((tiny_qwen3, drafter)) as llm:
        assert learned(llm) == (True, False)
        llm.generate(PROMPT, PARAMS)
    believe(3.0)
    with make((tiny_qwen3, drafter)) as llm:
        assert learned(llm) == (True, True)
    os.utime(next(drafter.glob("*.safetensors")), (1.0, 1.0))  # trained again
    with make((tiny_qwen3, drafter)) as llm:
        assert learned(llm) == (True, False)


def test_an_unmeasured_drafter_starts_with_its_card(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(tiny_drafter, drafter)
    lines = ["| category | length, T=0 | length, T=1 |", "|---|---|---|", "| overall | 1.9 | 1.3 |"]
    (drafter / "README.md").write_text("\n".join(lines))
    with make((tiny_qwen3, drafter)) as llm:
        survival = core_of(llm).acceptance
        assert survival is not None
        accepted = survival.samples(np.zeros(1, np.int32), 16).mean(axis=0)[0].sum()
        assert 1 + accepted == pytest.approx(1.6, abs=1e-3)


@pytest.mark.usefixtures("always_drafts")
def test_saved_statistics_by_which_drafts_do_not_pay_are_ignored(
    tiny_qwen3: Path, tiny_drafter: Path
) -> None:
    with make((tiny_qwen3, tiny_drafter)) as llm:
        llm.generate(PROMPT, PARAMS)
    believe(-5.0, draft_s=1e3)
    with make((tiny_qwen3, tiny_drafter)) as llm:
        assert learned(llm) == (True, False) and draft_s(llm) < 1e2, "costs are measured again at the start"


@pytest.mark.usefixtures("always_drafts")
def test_a_warm_up_is_in_no_metric_and_updates_only_costs(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make((tiny_qwen3, tiny_drafter)) as llm:
        # on a busy machine drafts may not pay, and costs would be measured again
        monkeypatch.setattr(type(core_of(llm)), "would_draft", True)
        before = llm.stats()
        llm.generate(PROMPT, PARAMS)
        assert llm.stats().generation_tokens == 60 and llm.stats().num_drafts > 0
        llm._speculation_cache.end_warm_up()
        after = llm.stats()
        assert (after, learned(llm)[1]) == (replace(before, draft_length=after.draft_length), False)
        assert core_of(llm).costs is not None and core_of(llm).costs.has_measurements
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids and llm.stats().generation_tokens == 60


def test_a_start_measures_every_draft_length_before_the_first_request(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, choose = list[int](), DraftLengthPolicy.choose

    def record(policy: DraftLengthPolicy, batch: DecodeBatch, load: StepLoad) -> DraftChoice:
        lengths.append((choice := choose(policy, batch, load)).length)
        return choice

    monkeypatch.setattr(DraftLengthPolicy, "choose", record)
    with make((tiny_qwen3, tiny_drafter)) as llm:
        assert set(lengths) == {*draft_lengths(15)}
        assert llm.stats().steps == 0 and llm.stats().generation_tokens == 0 and llm.stats().kv_usage == 0


def test_an_engine_whose_context_has_no_room_to_decode_starts(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    with make((tiny_qwen3, tiny_drafter), max_model_len=1) as llm:
        assert learned(llm) == (False, False)


def test_step_costs_are_saved_between_starts_and_change_no_token(
    tiny_qwen3: Path, tiny_drafter: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, tokens = (tiny_qwen3, tiny_drafter), list[list[int]]()
    with make(pair) as llm:
        tokens.append(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids)
    believe(3.0, draft_s=1e-6)
    monkeypatch.setattr(speculation_cache, "_MEASURE_S", 0.0)  # no drafting step is measured at the start
    (file,) = cache_folder().glob("step-costs-*.json")
    assert str(tiny_drafter) in json.loads(file.read_text())["subject"]["drafter"]
    with make(pair) as llm:
        assert draft_s(llm) < 1e-4
        tokens.append(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids)
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"value": {"rest": "broken"}}))
    with make(pair) as llm:
        assert core_of(llm).costs is not None and not core_of(llm).costs.has_measured_drafts
        tokens.append(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1] == tokens[2]
    assert "measuring again: these are no costs" in caplog.text
