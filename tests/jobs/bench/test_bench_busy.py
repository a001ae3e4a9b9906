"""`benchmarks busy`: idle and busy turns of the same prompts, the fair share, no remaining processes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.engine.busy import BusyOptions, CpuPressure, run_busy
from benchmarks.processes import busy_processes as owner
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.jobs.bench.common.engine_passes import EnginePass


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def f{i}("}) + "\n" for i in range(4)))
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    found: list[subprocess.Popen[bytes]] = []
    start = owner._start

    def spy() -> subprocess.Popen[bytes]:
        found.append(start())
        return found[-1]

    monkeypatch.setattr(owner, "_start", spy)
    return found


def config(pair: tuple[Path, Path], **settings: Any) -> EngineConfig:
    spec = {"model": str(pair[1])}
    return EngineConfig.from_dict(
        {
            "model": str(pair[0]),
            "speculative_config": spec,
            "num_threads": 1,
            "max_model_len": 256,
            "dtype": "float32",
            **settings,
        }
    )


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return process.returncode is not None
    return False


def test_idle_and_busy_turns_are_compared_with_the_fair_share(
    pair: tuple[Path, Path],
    prompts: Path,
    tmp_path: Path,
    started: list[subprocess.Popen[bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out" / "busy.json"
    run_busy(
        config(pair),
        BusyOptions(
            prompts=prompts,
            num_prompts=4,
            concurrency=(1, 2),
            rounds=1,
            max_tokens=6,
            busy=(1,),
            output=output,
        ),
    )
    figures = json.loads(output.read_text())
    assert {"command", "cpu", "cores", "versions", "git_sha"} <= set(figures["provenance"])
    assert [(p["requests"], p["busy_processes"]) for p in figures["points"]] == [(1, 1), (2, 1)]
    for point in figures["points"]:
        assert point["cpu_quota"] is None and point["threads"] == 1
        assert point["identical"] is True
        assert point["idleness"]["seconds"] > 0
        for mode in ("on", "off"):
            side = point[mode]
            assert side["dtype"] == "float32"
            assert len(side["rounds_idle_tokens_per_s"]) == len(side["rounds_busy_tokens_per_s"]) == 1
            assert side["share_of_idle"] == pytest.approx(
                side["busy_tokens_per_s"] / side["idle_tokens_per_s"], rel=1e-2
            )
            assert side["share_of_fair"] == pytest.approx(
                side["share_of_idle"] / point["fair_share"], rel=1e-2
            )
    assert len(started) == 2 * 2, "one for each busy turn"
    assert all(has_ended(process) for process in started)
    assert "1 busy process" in capsys.readouterr().out


def test_no_process_remains_when_a_busy_turn_fails(
    pair: tuple[Path, Path],
    prompts: Path,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = EnginePass.__call__

    def fail_when_busy(self: EnginePass, part: slice) -> Any:
        if started:
            assert not any(has_ended(process) for process in started)
            raise KeyboardInterrupt
        return run(self, part)

    monkeypatch.setattr(EnginePass, "__call__", fail_when_busy)
    with pytest.raises(KeyboardInterrupt):
        run_busy(
            config(pair),
            BusyOptions(prompts=prompts, concurrency=(1,), rounds=1, max_tokens=4, busy=(2,)),
        )
    assert len(started) == 2 and all(has_ended(process) for process in started)


def test_the_fair_share_is_that_of_equal_threads() -> None:
    two_threads = [CpuPressure(processes=n).fair_share(threads=2, cores=2) for n in (1, 2, 4)]
    assert two_threads == pytest.approx([2 / 3, 1 / 2, 1 / 3])
    assert CpuPressure(processes=1).fair_share(threads=1, cores=2) == 1.0
    assert CpuPressure(processes=2).fair_share(threads=4, cores=2) == pytest.approx(4 / 6)
    assert CpuPressure(quota=1.5).fair_share(threads=2, cores=2) == 0.75
    assert CpuPressure(quota=3.0).fair_share(threads=2, cores=2) == 1.0


def test_under_a_quota_the_fair_share_is_the_quotas(pair: tuple[Path, Path], prompts: Path) -> None:
    options = BusyOptions(
        prompts=prompts, concurrency=(1,), rounds=1, max_tokens=4, busy=(), cpu_quotas=(0.5,)
    )
    try:
        (point,) = run_busy(config(pair), options)["points"]
    except ConfigError as refused:
        assert refused.param == "cpu_quota"
        pytest.skip(refused.message)
    assert (point["busy_processes"], point["cpu_quota"], point["fair_share"]) == (0, 0.5, 0.5)


def test_wrong_options_are_named(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config is missing.*--spec-model"):
        run_busy(config(pair, speculative_config=None), BusyOptions())
    with pytest.raises(ConfigError, match=r"busy=\(0,\)"):
        BusyOptions(busy=(0,))
    with pytest.raises(ConfigError, match=r"cpu_quotas=\(-1\.0,\)"):
        BusyOptions(cpu_quotas=(-1.0,))
