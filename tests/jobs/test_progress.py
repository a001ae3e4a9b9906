"""Progress of long commands: when a line is written, and what it estimates."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import nullcontext
from io import StringIO

import pytest
from manta.actors.system.wait_messages import Wait, counting_on_terminal
from manta.jobs.common.progress import TimeLeft
from manta.jobs.simulate.node_run import NodeOptions, run_node
from support.paths import ROOT

PAIR = ROOT / "docs" / "benchmarks" / "qwen3-8b"


def test_progress_lines_are_printed_every_few_seconds_also_while_waiting() -> None:
    now_s, lines = [0.0], list[str]()
    with TimeLeft("answers", 40, "requests", report=lines.append, clock=lambda: now_s[0]) as progress:
        for second, done in enumerate([0, 0, 0, 4, 0, 0, 6, 0, 0, 0, 10, 90]):
            now_s[0] = float(second)
            progress.update(done)
    assert lines == [
        "answers: 0 of 40 requests (2 s)",
        "answers: 10 of 40 requests (25 %), about 18 s left",
        "answers: 20 of 40 requests (50 %), about 10 s left",
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
    def __init__(self) -> None:
        super().__init__()
        self.is_written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if "\n" in text:
            self.is_written.set()
        return written


def test_a_waiting_time_is_shown_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with counting_on_terminal("loading", every_s=0.01):
        assert terminal.is_written.wait(240)
    assert re.match(r"loading \(\d+ s\)\n", terminal.getvalue())
    monkeypatch.setattr(sys, "stderr", StringIO())
    assert isinstance(counting_on_terminal("loading"), nullcontext)


def test_the_next_wait_is_counted_from_its_start() -> None:
    lines = list[str]()
    wait = Wait("first", lines.append)
    wait.set_stage("second")
    assert lines == ["second"] and wait.what == "second"
