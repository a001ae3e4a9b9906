"""Answers for training: what a kill loses, that the engine stays full, what is shown, and the time."""

from __future__ import annotations

import os
import pty
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manta.actors.capture.target_outputs import TargetOutputs
from manta.actors.engine.uniproc_executor import make_executor
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import ConfigError
from manta.jobs.training.loop import answering
from manta.jobs.training.loop.answering import (
    ANSWERS_PER_PART,
    NUM_RUNNING,
    AnswerParts,
    answer_all,
    seconds_left,
    seconds_used,
    write_continuations,
)
from manta.jobs.training.loop.continuations import Continuations
from support.checkpoints.training_targets import write_target
from support.jobs.training_run import LAYOUT, answer, questions
from support.paths import module_command

pytestmark = pytest.mark.usefixtures("one_thread")  # as their processes

COUNT = 300


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@dataclass(frozen=True)
class Answered:
    folder: Path
    data: Continuations
    lines: list[str]  # one after each step


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """Answer all questions without a kill."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "_LINE_S", 0.0)
        folder = tmp_path_factory.mktemp("whole") / "answers"
        asked = questions(COUNT)
        report, how = lines.append, {"max_new_tokens": 40, "layout": LAYOUT}
        data = write_continuations(target, asked, folder, 1e6, report, **how)
    return Answered(folder, data, lines)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-??????.npz"))


def start(target: Path, folder: Path, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        module_command("support.jobs.training_run", ["answer", str(target), str(folder), str(COUNT)]),
        **streams,
    )


def test_a_killed_run_loses_at_most_a_part_and_ends_with_the_same_answers(
    target: Path, whole: Answered, tmp_path: Path
) -> None:
    process, folder = start(target, tmp_path / "killed"), tmp_path / "killed"
    while len(parts(folder)) < 2:
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    written = {path: path.read_bytes() for path in parts(folder)}
    reported: list[str] = []
    report, how = reported.append, {"max_new_tokens": 40, "layout": LAYOUT}
    continued = write_continuations(target, questions(COUNT), folder, float("inf"), report, **how)
    assert continued.digest == whole.data.digest and len(continued) == COUNT
    assert all(path.read_bytes() == content for path, content in written.items()), "no part is answered again"
    assert reported[-1].startswith(f"killed: {COUNT} of {COUNT} answered")
    assert len(parts(folder)) == -(-COUNT // ANSWERS_PER_PART)
    check_outputs(folder, continued, whole)
    again = answer(target, folder, COUNT)
    assert again.digest == whole.data.digest and len(parts(folder)) == -(-COUNT // ANSWERS_PER_PART)


def check_outputs(folder: Path, data: Continuations, whole: Answered) -> None:
    """Check that a folder has outputs for all sequences: those of a run without a kill, but for rounding."""
    ours, theirs = (TargetOutputs(LAYOUT, [each]) for each in (folder, whole.folder))
    assert len(ours) == len(theirs) == len(data) == COUNT
    for (_, ids), first in zip(sequences(data), data.first.tolist(), strict=True):
        one, other = ours.of(ids, first), theirs.of(ids, first)
        taps = [torch.from_numpy(each.taps.copy()).view(torch.bfloat16) for each in (one, other)]
        torch.testing.assert_close(*taps, atol=1e-2, rtol=1e-2)
        assert np.abs(one.log_probs - other.log_probs).max() < 0.02


def test_every_step_has_as_many_answers_as_there_are_left(target: Path) -> None:
    config = EngineConfig.from_dict({"model": str(target), "max_num_seqs": NUM_RUNNING, "num_threads": 1})
    num_ended = 0
    with closing(EngineCore(config, make_executor(config))) as engine:
        for _, ended in answer_all(engine, questions(COUNT), range(COUNT), 40, lambda: False):
            assert engine.stats().running + len(ended) == min(NUM_RUNNING, COUNT - num_ended)
            num_ended += len(ended)
    assert num_ended == COUNT


def test_the_end_of_the_time_cuts_no_answer_and_leaves_a_sample_of_all_questions(
    target: Path, whole: Answered, tmp_path: Path
) -> None:
    expected = {tuple(prompt): ids for prompt, ids in sequences(whole.data)}
    some = sequences(answer(target, tmp_path / "some", COUNT, budget_s=1e-3))
    assert len(some) == NUM_RUNNING and all(expected[tuple(prompt)] == ids for prompt, ids in some)
    order = [question.prompt_ids for question in questions(COUNT)]
    places = [order.index(tuple(prompt)) for prompt, _ in some]
    assert places == sorted(places) and places[0] < COUNT / 6 and places[-1] > COUNT * 5 / 6
    assert seconds_used(tmp_path / "some") > 1e-3
    assert len(answer(target, tmp_path / "some", COUNT, budget_s=1e-3)) == NUM_RUNNING, "the time is over"


def sequences(data: Continuations) -> list[tuple[list[int], list[int]]]:
    starts, ends = data.bounds[:-1].tolist(), data.bounds[1:].tolist()
    return [
        (data.ids[start : start + first].tolist(), data.ids[start:end].tolist())
        for start, end, first in zip(starts, ends, data.first.tolist(), strict=True)
    ]


def test_answers_to_other_prompts_are_refused(tmp_path: Path) -> None:
    asked = questions(8)
    parts = AnswerParts(tmp_path, asked)
    for number, tokens in enumerate(([], [4], *[[5, 6]] * 6)):
        parts.add(number, tokens)
    parts.write(used_s=1.0)
    assert len(AnswerParts(tmp_path, asked)) == 8 and len(parts.read()) == 6, "short ones are not asked again"
    for other in ([replace(each, prompt_ids=(*each.prompt_ids, 1)) for each in asked], asked[:4]):
        with pytest.raises(ConfigError, match="other prompts"):
            AnswerParts(tmp_path, other)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this size: a limit of the process, in place of the disk's."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_named_and_leaves_no_half_part(tmp_path: Path) -> None:
    filled = AnswerParts(tmp_path, questions(8))
    for number in range(8):
        filled.add(number, [number] * 600)
    with full_disk(10_000), pytest.raises(ConfigError, match=r"cannot be written \(File too large\). Make"):
        filled.write(used_s=1.0)
    assert not parts(tmp_path)
    filled.write(used_s=1.0)
    assert len(filled.read()) == 8


def test_a_disk_too_small_for_the_outputs_is_named(target: Path, tmp_path: Path) -> None:
    with full_disk(60_000), pytest.raises(ConfigError, match=r"cannot be written \(File too large\). Make"):
        answer(target, tmp_path, COUNT)
    assert not parts(tmp_path) and not len(TargetOutputs(LAYOUT, [tmp_path]))


def test_a_log_gets_lines_with_answers_speed_and_time_left(whole: Answered) -> None:
    pattern = r"answers: (\d+) of 300 answered, \d+ tokens/s(, about .* left|, in .*|)"
    found = [re.fullmatch(pattern, line) for line in whole.lines[1:]]
    size, *lines = whole.lines
    assert size.startswith("if all answers are as long as allowed, the target's outputs take 0.01 GB: ")
    assert all(found), lines
    counts = [int(each[1]) for each in found if each]
    assert counts == sorted(counts) and counts[-1] == COUNT
    for line, count in zip(lines[:-1], counts, strict=False):
        assert ("left" in line) == (count >= NUM_RUNNING), line


def test_a_terminal_gets_one_line_that_is_rewritten(target: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(target, tmp_path / "answers", stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the terminal is closed
            break
    os.close(ours)
    stdout, _ = process.communicate()
    shown = re.sub(rb"loading the target \(\d+ s\)\r\n", b"", shown)
    states = shown.decode().split("\r\x1b[K")
    assert "\n" not in shown.decode() and any("tokens/s" in state for state in states), shown
    assert states[-1] == "" and stdout.decode().count("answered") == 1


def test_the_time_left_for_training_is_what_answering_left() -> None:
    assert seconds_left(60.0, 12.5, "hours") == 47.5
    with pytest.raises(ConfigError, match="hours: answering took 2 min of 1 min, and no time is left"):
        seconds_left(60.0, 120.0, "hours")
