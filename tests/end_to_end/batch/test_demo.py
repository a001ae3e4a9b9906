"""The demo's comparison on a tiny pair, in processes of its own as in `manta demo`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from manta.jobs.demo import ChatAnswer, DemoOptions, compare_modes, print_result


def test_both_modes_alternate_and_are_shown_in_one_table(
    pair: tuple[Path, Path],
    write_lines: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = write_lines({"prompt": f"def f{i}("} for i in range(3))
    monkeypatch.chdir(tmp_path)  # no settings of a ray_config.yaml
    options = DemoOptions(target=pair[0], drafter=pair[1], rows=3, max_tokens=4)
    point = compare_modes(options, dataset, tmp_path)
    said = capfd.readouterr().out
    assert "$ manta bench" in said and "--no-trial" in said
    assert "tokens/s" not in said, "no table of the benchmark's own"
    assert point["requests"] == 2 and point["on"]["tokens"] == point["off"]["tokens"] == 3 * 4
    chat = {True: ChatAnswer("a", 40, 8, 0.5), False: ChatAnswer("a", 40, 40, 1.0)}
    print_result(chat, point, options)
    shown = capfd.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert rows[:3] == [
        ["chat: tokens", "40", "40", ""],
        ["chat: events", "8", "40", ""],
        ["chat: tokens/s", "80", "40", "2.00 x"],
    ]
    assert rows[3][0] == "dataset, 2 requests at once: tokens/s" and rows[3][3] == f"{point['speedup']:.2f} x"
    assert (point["idleness"]["warning"] or "") in shown
