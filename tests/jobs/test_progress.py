"""Progress of long commands: when a line is written, and what it estimates."""

from __future__ import annotations

import re
import sys
import threading
import time
from io import StringIO

import pytest
from manta.actors.system.wait_messages import StderrReport, counting, say
from manta.jobs.common.progress import TimeLeft
from manta.jobs.simulate.node_run import NodeOptions, run_node
from support.paths import ROOT

PAIR = ROOT / "docs" / "benchmarks" / "qwen3-8b"


def test_progress_lines_are_printed_every_few_seconds_also_while_waiting() -> None:
    now_s, lines = [0.0], list[str]()
    with TimeLeft("answers", 40, "requests", report=lines.append, clock=lambda: now_s[0]) as progress:
        for second, done in [(0, 0), (2, 0), (9, 4), (12, 6), (20, 5), (22, 5), (30, 90)]:
            now_s[0] = float(second)
            progress.update(done)
    assert lines == [
        "answers: 0 of 40 requests (2 s)",
        "answers: 10 of 40 requests (25 %), about 36 s left",
        "answers: 20 of 40 requests (50 %), about 22 s left",
    ]


@pytest.mark.parametrize("load", [{"concurrency": (2,)}, {"rate_per_s": (4.0,), "num_requests": 6}])
def test_a_simulated_node_reports_progress_over_all_points(
    load: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("manta.jobs.common.progress.FIRST_S", 0.0)
    monkeypatch.setattr("manta.jobs.common.progress.INTERVAL_S", 0.0)
    small = {"max_model_len": 2048, "prompt_tokens": 20, "output_tokens": 4}
    run_node(NodeOptions(model=str(PAIR / "target"), methods=("plain",), tp=(4, 8), **small, **load))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("simulating ")]
    assert lines[0].startswith("simulating 2 methods and layouts: ")
    assert lines[-1].endswith(" 100 %, about 0 s left")


class Terminal(StringIO):
    """Keeps what is written; `is_rewritten` is set by the second line of progress."""

    def __init__(self) -> None:
        super().__init__()
        self.is_rewritten = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if " s)" in text:
            self.is_rewritten.set()
        return written


def shown(text: str) -> list[str]:
    """Return what a terminal shows in the end: a line that is erased or written over is gone."""
    lines = [line.rpartition("\x1b[K")[2].rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line]


def test_a_terminal_has_one_line_of_progress_and_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    report = StderrReport("manta: ")
    with counting("loading", report, every_s=0.01) as wait:
        assert terminal.is_rewritten.wait(600)
        wait.set_stage("warming up")
        report("the model has 3 layers")
    report("ready")
    said = terminal.getvalue()
    assert re.search(r"\r\x1b\[Kmanta: loading \(\d+ s\)\r", said) and "warming up" in said
    assert shown(said) == ["manta: the model has 3 layers", "manta: ready"]


def test_a_log_has_one_line_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    log = StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with counting("first", say, every_s=0.001) as wait, counting("unsaid", say, begin=False, every_s=0.001):
        time.sleep(0.05)
        wait.set_stage("second")
    assert log.getvalue() == "first\nsecond\n"


def test_counts_are_rewritten_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, now_s = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", terminal)
    with TimeLeft("answers", 4, "requests", clock=lambda: now_s[0]) as progress:
        for second in range(4):
            now_s[0] = float(second)
            progress.update()
    assert "answers: 3 of 4 requests (75 %), about 1 s left" in terminal.getvalue()
    assert shown(terminal.getvalue()) == []
