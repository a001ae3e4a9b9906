"""Pictures of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from manta.jobs.bench.sweep.sweep_run import sweep_pictures
from manta.jobs.common.plots import plotted, write_svgs

HOSTILE = """<script>document.title="owned"</script>'"><img src=x onerror=alert(1)>&amp;"""

NAMES = ["pareto", "speedup-by-load"]


def synthetic_sweep() -> dict[str, Any]:
    def side(speed: float, ratio: float, accepted: list[float]) -> dict[str, Any]:
        reported = {"blocks": 50, "drafted": [50] * len(accepted), "accepted": accepted}
        return {
            "tokens_per_s": speed,
            "user_tokens_per_s": speed / 4,
            "ratio_to_plain": ratio,
            "tokens": 100,
            "acceptance": {HOSTILE: reported, "code": reported} if accepted else {},
            "step_seconds": {"schedule": 0.01, "draft": 0.1, "verify": 0.4, "execute": 0.6, "commit": 0.02},
        }

    sides = {
        "adaptive": side(400, 1.6, [0.8]),
        "plain": side(250, 1.0, []),
        "dflash-1": side(300, 1.2, [0.8]),
        "dflash-15": side(350, 1.4, [0.9 - 0.05 * i for i in range(15)]),
        "random": side(240, 0.96, [0.0]),
    }
    measured = {"least": 1.0, "measured": 1.6, "range": [1.5, 1.7], "met": True}
    verdict = {"bar": "adaptive to plain", "where": HOSTILE, **measured}
    return {
        "provenance": {"gpu": None, "cpu": HOSTILE, "cores": 2, "date": "today", "command": HOSTILE},
        "engine": {"speculative_config": {"method": "dflash"}},
        "options": {"methods": {}, "prompts": HOSTILE},
        "points": [{"requests": c, "traffic": "prompts", "sides": sides} for c in (1, 8, 64)],
        "verdicts": [verdict],
        "refused": {"ngram": HOSTILE},
    }


def test_pictures_are_also_written_as_files(tmp_path: Path) -> None:
    paths = write_svgs(sweep_pictures(synthetic_sweep()), tmp_path)
    assert [path.stem for path in paths] == NAMES
    for path in paths:
        assert ElementTree.fromstring(path.read_text()).tag == "{http://www.w3.org/2000/svg}svg"


def test_pictures_show_the_figures_of_the_sweep() -> None:
    found = {picture.name: picture for picture in sweep_pictures(synthetic_sweep())}
    drawn = {name: plotted(picture).axes[0] for name, picture in found.items()}
    assert list(drawn) == NAMES
    pareto = {line.get_label(): line.get_xydata().tolist() for line in drawn["pareto"].lines}
    assert pareto == {"plain": [[62.5, 250]] * 3, "dflash": [[100, 400]] * 3}
    speedup = {line.get_label(): line.get_ydata() for line in drawn["speedup-by-load"].lines}
    assert list(speedup["adaptive"]) == [1.6] * 3 and list(speedup["dflash-15"]) == [1.4] * 3
    assert [1.0, 1.0] in [list(line) for line in speedup.values()], "break-even is marked"
    assert [text.get_text() for text in drawn["speedup-by-load"].get_xticklabels()] == ["1", "8", "64"]
