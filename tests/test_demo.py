"""The demo's comparison, on a tiny pair and in processes of its own, as `manta demo` runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manta.jobs.demo import DemoOptions, compare_modes
from text_pair import make_text_pair


def test_the_modes_are_compared_by_turns_of_a_benchmark(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = make_text_pair(tmp_path)
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": f"def f{i}("}) + "\n" for i in range(3)))
    monkeypatch.chdir(tmp_path)  # no settings of a ray_config.yaml
    compare_modes(DemoOptions(target=target, drafter=drafter, rows=3, max_tokens=4), dataset, tmp_path)
    said = capfd.readouterr().out
    assert "$ manta bench" in said and "--no-trial" in said
    assert "times the speed of plain decoding; the outputs are identical." in said
    (point,) = json.loads((tmp_path / "figures.json").read_text())["points"]
    assert point["requests"] == 2 and point["on"]["tokens"] == point["off"]["tokens"] == 3 * 4
    assert f"{point['speedup']:.2f} times" in said
    assert (point["idleness"]["warning"] or "") in said
