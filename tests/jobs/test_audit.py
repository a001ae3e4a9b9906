"""The audit passes on a correct pair and detects a wrong acceptance rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.drafter.step.cpu_numba.step_ops import LoopStepOperators
from manta.jobs.audit.audit_run import AuditOptions, run_audit
from manta.jobs.cli import app
from torch import Tensor
from typer.testing import CliRunner


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ["import os", "def main(", "class A:", "for x in "]
    path.write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": text}) + "\n" for i, text in enumerate(texts))
    )
    return path


def test_a_certificate_lists_what_was_compared(pair: tuple[Path, Path], prompts: Path) -> None:
    target, drafter = pair
    output = prompts.parent / "certificate.json"
    reported = ["-i", str(prompts), "--max-tokens", "12", "-t", "0", "-t", "1", "-o", str(output)]
    flags = ["--spec-model", str(drafter), "--dtype", "float32", "--num-threads", "1"]
    result = CliRunner().invoke(app, ["audit", str(target), *flags, *reported])
    assert result.exit_code == 0 and "every token is the same" in result.output, result.output
    found = json.loads(output.read_text())
    assert found["lossless"] is True and found["mismatches"] == 0 and found["requests"] == 8
    assert 0 < found["tokens"] <= 96 and found["drafted_tokens"] > 0
    assert found["dtype"] == "float32" and found["device"] == "cpu"
    assert len(found["target"]["digest"]) == 64 != found["drafter"]["digest"]
    assert found["engine"]["speculative_config"]["model"] == str(drafter)


def test_an_acceptance_rule_that_is_too_lenient_is_detected(
    pair: tuple[Path, Path], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = LoopStepOperators.accept

    def lenient(chosen_X: Tensor, counts_R: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
        token_ids_RW, num_tokens_R = accept(chosen_X, counts_R, drafts_RK)
        if drafts_RK.shape[1]:
            first_R = torch.where(drafts_RK[:, 0] >= 0, drafts_RK[:, 0], token_ids_RW[:, 0])
            token_ids_RW[:, 0] = torch.where(num_tokens_R > 0, first_R, token_ids_RW[:, 0])
        return token_ids_RW, num_tokens_R

    monkeypatch.setattr(LoopStepOperators, "accept", staticmethod(lenient))
    target, drafter = pair
    config = EngineConfig.from_dict(
        {"model": str(target), "speculative_config": {"model": str(drafter)}, "dtype": "float32"}
    )
    found = run_audit(config, AuditOptions(prompts=prompts, max_tokens=12, temperatures=(0.0,)))
    assert not found["lossless"] and found["mismatches"] == len(found["first_mismatches"]) > 0
    first = found["first_mismatches"][0]
    assert first["id"].startswith("p") and 0 <= first["position"] < 12


def test_without_speculation_there_is_nothing_to_audit(pair: tuple[Path, Path], prompts: Path) -> None:
    with pytest.raises(ConfigError, match="--spec-model"):
        run_audit(EngineConfig.from_dict({"model": str(pair[0])}), AuditOptions(prompts=prompts))
