"""A CPU uses the fastest measured backend among those that are exact and allowed."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from manta.actors.targets.loading import cpu_autotune
from manta.actors.targets.loading.cpu_autotune import (
    CpuConfig,
    Timed,
    choose_cpu_config,
    fastest,
    measured,
    time_configs,
)
from manta.cluster.config import EngineConfig
from manta.drafter.compute.backend import DeviceCapabilities, ModelStackSpec

COMPILED, LOOPS, WIDE = cpu_autotune.CPU_CONFIGS
MACHINE = DeviceCapabilities(torch.device("cpu"), torch.bfloat16, page_size=16, num_ranks=1)
MODEL = ModelStackSpec(name="target", sizes=frozenset({256, 1024}), head_dims=frozenset({64}))
ODD = ModelStackSpec(name="target", sizes=frozenset({250, 1000}), head_dims=frozenset({64}))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))
    if cpu_autotune.instructions_of_passes() is None:
        pytest.skip("no compiled pass here")
    return tmp_path


def measure(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[CpuConfig, float],
    exact: tuple[CpuConfig, ...] = cpu_autotune.CPU_CONFIGS,
) -> list[CpuConfig]:
    """Simulate a machine with given times; return the choice and the backends checked for exactness."""
    requested: list[CpuConfig] = []

    def is_exact(candidate: CpuConfig, num_threads: int) -> bool:
        requested.append(candidate)
        return candidate in exact

    monkeypatch.setattr(cpu_autotune, "time_config", lambda candidate, num_threads: seconds[candidate])
    monkeypatch.setattr(cpu_autotune, "is_exact", is_exact)
    time_configs(2)
    return requested


def chosen(model: ModelStackSpec = MODEL, num_values: int = 10**6, **settings: Any) -> CpuConfig:
    config = EngineConfig.from_dict({"model": "none", "device": "cpu", "num_threads": 2, **settings})
    return choose_cpu_config(config, [model], "bfloat16", MACHINE, num_values)


def test_the_fastest_measured_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() == COMPILED, "by itself"
    measure(monkeypatch, {COMPILED: 0.004, LOOPS: 0.003, WIDE: 0.001})
    assert chosen() == WIDE
    assert chosen(dtype="bfloat16") == LOOPS
    assert chosen(attention_backend="compiled") == COMPILED
    assert chosen(num_values=2**29) == LOOPS, "a large model is not widened"
    assert chosen(num_threads=1) == COMPILED, "on other threads nothing was measured"
    assert chosen(tensor_parallel_size=2) == COMPILED, "workers, which must agree, do not look"


def test_an_inexact_or_hardly_faster_backend_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = measure(monkeypatch, {COMPILED: 0.0031, LOOPS: 0.001, WIDE: 0.003}, exact=(WIDE,))
    assert chosen() == COMPILED
    assert requested == [LOOPS], "nobody would choose the others for their speed"


def test_a_model_that_the_fastest_backend_cannot_run_gets_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure(monkeypatch, {COMPILED: 0.001, LOOPS: 0.008, WIDE: 0.004})
    assert chosen() == COMPILED and chosen(ODD) == WIDE


def test_measurements_are_reused_only_for_the_same_cpu_and_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure(monkeypatch, {COMPILED: 0.004, LOOPS: 0.003, WIDE: 0.001})
    assert measure(monkeypatch, {}) == []
    before = measured(2)
    for name, value in (("cpu_name", "another"), ("instructions_of_passes", "others")):
        with monkeypatch.context() as other:
            other.setattr(cpu_autotune, name, lambda value=value: value)
            assert measured(2) == {}
    assert measured(2) == before != {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "{",
        lambda kept: json.dumps([kept]),
        lambda kept: json.dumps({**kept, "written_s": time.time() - 100 * 86400}),
        lambda kept: json.dumps({**kept, "subject": {}}),
        lambda kept: json.dumps({**kept, "value": {"torch float32": [0.0, True]}}),
        lambda kept: json.dumps({**kept, "value": {"torch float32": [math.nan, True]}}),
        lambda kept: json.dumps({**kept, "value": {"torch float32": "fast"}}),
        lambda kept: json.dumps({**kept, "value": [1, 2]}),
    ],
    ids=["cut", "list", "old", "foreign", "zero", "nan", "words", "another form"],
)
def test_a_stale_or_corrupt_file_is_ignored_and_replaced(
    monkeypatch: pytest.MonkeyPatch, folder: Path, damage: Any
) -> None:
    measure(monkeypatch, {COMPILED: 0.004, LOOPS: 0.003, WIDE: 0.001})
    (file,) = folder.iterdir()
    file.write_text(damage(json.loads(file.read_text())))
    assert measured(2) == {} and chosen() == COMPILED
    measure(monkeypatch, {COMPILED: 0.001, LOOPS: 0.003, WIDE: 0.004})
    assert measured(2)[COMPILED] == Timed(0.001, exact=True)


def test_the_trial_times_every_backend_of_this_machine_and_frees_its_threads() -> None:
    before = torch.get_num_threads()
    trial = [cpu_autotune._TRIAL_SPEC]
    possible = [config for config in cpu_autotune.CPU_CONFIGS if config.runs(trial, MACHINE)]
    for candidate in possible:
        assert 0.0 < cpu_autotune.time_config(candidate, before) < math.inf
        assert torch.get_num_threads() == before
    assert COMPILED in possible and fastest(COMPILED, possible, {}) == COMPILED
