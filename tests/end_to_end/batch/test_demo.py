"""The demo's parts on a tiny pair, in processes of their own as in `manta demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError
from manta.jobs.common.http_client import ServerClient
from manta.jobs.demo.answer_stream import ChatAnswer, SideBySide, stream_answer
from manta.jobs.demo.demo_models import QUESTIONS, DemoPair, Question, usual_pair
from manta.jobs.demo.demo_run import DemoOptions, compare_modes, print_result, run_demo
from support.checkpoints.text_pair import LiveServer
from support.paths import MODELS


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[LiveServer]:
    drafting = {"model": str(pair[1]), "adaptive": False}
    settings = {"model": str(pair[0]), "speculative_config": drafting, "dtype": "float32", "num_threads": 1}
    with LiveServer(EngineConfig.from_dict(settings)) as live:
        yield live


def test_both_modes_alternate_and_are_shown_in_one_table(
    pair: tuple[Path, Path],
    write_lines: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = write_lines({"prompt": f"def f{i}("} for i in range(3))
    monkeypatch.chdir(tmp_path)  # no settings of a ray_config.yaml
    options = DemoOptions(rows=3, max_tokens=4)
    point = compare_modes(DemoPair(str(pair[0]), str(pair[1]), dataset), options, dataset, tmp_path)
    said = capfd.readouterr().out
    assert "$ manta bench" in said and "--no-trial" in said
    assert "tokens/s" not in said, "no table of the benchmark's own"
    assert point["requests"] == 2 and point["on"]["tokens"] == point["off"]["tokens"] == 3 * 4
    answers = [{True: ChatAnswer("a", 40, 8, 0.5), False: ChatAnswer("a", 40, 40, 1.0)}] * 2
    print_result(answers, point, options)
    shown = capfd.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    length = f"{point['on']['mean_acceptance_length']:.2f}"  # drafts in every step, however slow they are
    assert rows[:3] == [
        ["answers: steps of the target", "16", "80", "5.00 x fewer"],
        ["dataset: tokens of a step", length, "1.00", f"{length} x as many"],
        ["answers: seconds", "1.00", "2.00", "2.00 x as fast"],
    ]
    assert rows[3][0] == "dataset, 2 requests at once: tokens/s"
    assert rows[3][3] == f"{point['speedup']:.2f} x as fast"
    assert (point["idleness"]["warning"] or "") in shown


@pytest.mark.parametrize("question", QUESTIONS, ids=["explanation", "list", "JSON"])
def test_an_answer_is_shown_once_and_its_steps_are_counted(
    question: Question, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with ServerClient(server.url) as client, SideBySide() as view:
        on = stream_answer(client, question, 24, speculate=True, view=view)
        off = stream_answer(client, question, 24, speculate=False, view=view)
    assert on.text == off.text and on.num_tokens == off.num_tokens == off.num_steps > 1
    assert 0 < on.num_steps <= on.num_tokens
    assert capsys.readouterr().out == on.text + "\n"


def test_without_an_index_the_small_pair_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pair = usual_pair()
    assert (Path(pair.target).resolve(), Path(pair.drafter).resolve()) == (
        MODELS / "target",
        MODELS / "drafter",
    )
    assert len(pair.questions) == 1 and "allowed_domains" in pair.questions[0].text
    assert "Instead this demo shows the small pair" in capsys.readouterr().out


def test_a_pair_is_given_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^drafter: is not given\. Give target, drafter and prompts"):
        run_demo(DemoOptions(target=MODELS / "target"))
    with pytest.raises(CheckpointError, match=r"^prompts: .*no\.jsonl is missing"):
        run_demo(
            DemoOptions(target=MODELS / "target", drafter=MODELS / "drafter", prompts=tmp_path / "no.jsonl")
        )
