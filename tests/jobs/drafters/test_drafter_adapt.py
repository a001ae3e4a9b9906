"""Adapting a drafter: the split of prompts, the gate, and a whole run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from manta.actors.capture.records import CapturedRecord, segment_path
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import ConfigError, DatasetError
from manta.jobs.cli import app
from manta.jobs.drafters.train import adapt_run as adapt
from manta.jobs.drafters.train.adapt_data import AdaptRunKey, prepare_text, read_examples
from manta.jobs.drafters.train.adapt_run import GateLengths, judge
from manta.jobs.training.loop.training_loop import Length
from manta.jobs.training.train_drafter import Trained, train
from support.checkpoints.text_pair import VOCAB
from typer.testing import CliRunner


def captured(folder: Path, count: int, *, model: str = "m", private: bool = False) -> Path:
    """Write captured completions that count on from their prompts."""
    folder.mkdir(exist_ok=True)
    records = [
        CapturedRecord(
            () if private else (number, number + 1, number + 2),
            tuple((number + i) % VOCAB for i in range(3, 43)),
            model,
            "2026-11-23",
            category=("even", "odd")[number % 2],
        )
        for number in range(count)
    ]
    with segment_path(folder, 1).open("ab") as file:
        file.writelines(record.line() for record in records)
    return folder


def test_the_gate_requires_a_gain_on_new_text_and_no_loss_on_old() -> None:
    before = GateLengths(2.0, {"code": 4.0, "chat": 3.0})
    good = judge(before, GateLengths(2.2, {"code": 3.9, "chat": 3.0}), min_gain=0.05)
    assert good.passed and good.as_json()["tokens_per_step"]["new"]["gain"] == pytest.approx(0.1)
    idle = judge(before, GateLengths(2.08, {"code": 4.4, "chat": 3.3}), min_gain=0.05)
    assert not idle.passed and "new text gains +4.0%" in idle.complaints[0]
    forgetful = judge(before, GateLengths(3.0, {"code": 4.0, "chat": 2.9}), min_gain=0.05)
    assert forgetful.complaints == ("chat loses 3.3%, more than 3%",)


def test_no_prompt_is_both_trained_on_and_held_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(pair[0])
    data, replay = captured(tmp_path / "new", 200), captured(tmp_path / "old", 120)
    captured(data, 200)  # sent twice
    requested = AdaptRunKey("drafter", str(pair[0]), str(data), str(replay), 1.0)
    work = tmp_path / "work"
    work.mkdir()
    text = prepare_text(requested, work, tokenizer, print)
    assert text.training_s == 60.0, "nothing had to be asked"
    starts = {tuple(text.new.ids[at : at + 3].tolist()) for at in text.new.bounds[:-1]}
    held_out = {each.prompt for each in text.held_out_new}
    assert len(starts) + len(held_out) == 200 and not starts & held_out
    assert 25 <= len(held_out) <= 55 and len(held_out) == len(text.held_out_new), "none twice"
    assert {each.category for each in text.held_out_new} == {"even", "odd"}
    assert set(text.new.first.tolist()) == {3} and len(text.new) == 2 * len(starts)
    share = len(text.old) * round(len(text.new) / len(text.old)) / len(text.mixture())
    assert 0.4 < share < 0.6, "half of what is learnt is old"
    captured(data, 300)  # meanwhile
    again = prepare_text(requested, work, tokenizer, print)
    assert again.mixture().digest == text.mixture().digest and again.held_out_new == text.held_out_new
    other = AdaptRunKey("drafter", str(pair[0]), str(data), str(replay), 2.0)
    with pytest.raises(ConfigError, match="another run"):
        prepare_text(other, work, tokenizer, print)


def test_unusable_training_text_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(pair[0])
    (few, *_), (private, *_) = (
        read_examples(captured(tmp_path / name, 3, private=name == "private"), tokenizer, "data")
        for name in ("few", "private")
    )
    assert few.prompt == (0, 1, 2) and few.answer is not None
    assert private.answer is not None and private.prompt + private.answer == few.answer
    with pytest.raises(DatasetError, match="at least 8 of both"):
        requested = AdaptRunKey("drafter", str(pair[0]), str(tmp_path / "few"), str(tmp_path / "few"), 1.0)
        prepare_text(requested, tmp_path, tokenizer, print)
    captured(tmp_path / "few", 3, model="other")
    with pytest.raises(DatasetError, match="several models"):
        read_examples(tmp_path / "few", tokenizer, "data")
    with pytest.raises(DatasetError, match="does not exist"):
        read_examples(tmp_path / "none.jsonl", tokenizer, "data")


def test_the_gate_decides_whether_anything_is_written(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is untrained and the gate's figures are given."""

    def trained(
        target: Path, data: object, watched: object, folder: Path, *_: object, **__: object
    ) -> Trained:
        shutil.copytree(pair[1], folder / "drafter", dirs_exist_ok=True)
        return Trained(folder / "drafter", folder / "curves.jsonl", 3, 100, 1.0, {}, {})

    given = [GateLengths(2.0, {"even": 4.0}), GateLengths(2.3, {"even": 3.8})] * 2 + [
        GateLengths(2.0, {"even": 4.0})
    ]
    given += [GateLengths(2.3, {"even": 3.9})]
    monkeypatch.setattr(adapt, "train", trained)
    monkeypatch.setattr(adapt, "measure", lambda *_: given.pop(0))
    data, replay, output = captured(tmp_path / "new", 200), captured(tmp_path / "old", 100), tmp_path / "out"
    command = ["drafter", "adapt", str(pair[1]), "--target", str(pair[0]), "--data", str(data)]
    command += ["--replay", str(replay), "-o", str(output)]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1 and "even loses 5.0%, more than 3%" in refused.stdout, refused.output
    as_json = CliRunner().invoke(app, [*command, "--json"])
    assert as_json.exit_code == 1 and not json.loads(as_json.stdout)["passed"]
    assert not output.exists(), "the old one stays"
    passed = CliRunner().invoke(app, command)
    assert passed.exit_code == 0 and "+15.0%" in passed.stdout and str(output.name) in passed.stdout
    assert (output / "model.safetensors").read_bytes() == (pair[1] / "model.safetensors").read_bytes()
    assert json.loads((output / "adapt.json").read_text())["passed"]
    assert (tmp_path / "out.work").stat().st_mode & 0o077 == 0, "text of users is in it"
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, ConfigError) and "exists already" in again.exception.message


@pytest.mark.slow
def test_a_drafter_learns_from_its_targets_answers(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are the target's, and tokens per step are decoded; the run has steps, not a time."""

    def by_steps(target: Any, data: Any, watched: Any, folder: Any, _: Length, **more: Any) -> Trained:
        return train(target, data, watched, folder, Length(steps=300), **more)

    monkeypatch.setattr(adapt, "train", by_steps)
    monkeypatch.setattr(adapt, "MEASURED_TOKENS", 24)
    prompts = tmp_path / "prompts.jsonl"
    words = ["import", "def", "class", "for", "while", "return", "print", "with"]
    texts = [f"{one} {other}(" for one in words for other in words]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    command = ["drafter", "adapt", str(pair[1]), "--target", str(pair[0]), "--data", str(prompts)]
    command += ["--replay", str(prompts), "--num-threads", "1", "-o", str(tmp_path / "adapted"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["steps"] == 300 and figures["tokens_per_step"]["new"]["gain"] >= 0.05, figures
