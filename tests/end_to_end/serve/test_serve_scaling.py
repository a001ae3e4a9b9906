"""Real Serve, real replicas: their number follows the load up and down, and no request fails."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import ray
from benchmarks.serving.scale import Asked, Moment, ScaleOptions, Seen, run_scale, summary
from manta.cluster.errors import ConfigError
from manta.cluster.fleet.autoscaling import ScalingRules
from manta.cluster.metrics.fleet_metrics import SCALING_CATALOGUE
from prometheus_client.parser import text_string_to_metric_families
from support.checkpoints.text_pair import make_text_pair


@pytest.mark.slow
def test_load_adds_a_replica_and_idleness_removes_all_without_a_failed_request(
    tmp_path: Path,
) -> None:
    target, drafter = make_text_pair(tmp_path / "pair")
    settings = {
        "model": str(target),
        "speculative_config": {"model": str(drafter)},
        "served_model_name": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 4,
        "num_pages": 256,
    }
    options = ScaleOptions(
        replicas=(0, 2),
        rules=ScalingRules(up_after_s=0.5, down_after_s=3.0, idle_s=5.0),
        many=8,
        hold_s=2.0,
        max_tokens=100,
        output=tmp_path / "scale.json",
        plot=tmp_path / "scale.svg",
    )
    reported: dict[str, set[float]] = {}
    with listening_to_ray(reported):
        figures = run_scale(settings, options)
    assert reported["ray_manta_autoscaler_wanted_replicas"] >= {0.0, 1.0, 2.0}
    assert reported.keys() == {
        f"ray_{metric.name}{'_total' if metric.kind == 'counter' else ''}" for metric in SCALING_CATALOGUE
    }
    numbers = [moment["serving"] for moment in figures["moments"]]
    path = [n for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1]]
    assert path == [1, 2, 1, 0, 1]
    assert figures["requests"] > 20 and figures["failed"] == 0
    assert json.loads((tmp_path / "scale.json").read_text())["windows"]
    assert "<svg" in (tmp_path / "scale.svg").read_text()


@contextmanager
def listening_to_ray(reported: dict[str, set[float]]) -> Iterator[None]:
    """The autoscaler's metrics from Ray's exporter meanwhile: by name, all values seen."""
    over = threading.Event()

    def listen() -> None:
        while not over.wait(0.5):
            with contextlib.suppress(Exception):  # Ray is not up yet, or goes down
                (node,) = ray.nodes()
                url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
                for family in text_string_to_metric_families(httpx.get(url).text):
                    for sample in family.samples:
                        if sample.name.startswith("ray_manta_autoscaler_"):
                            assert sample.labels["deployment"] == "manta"
                            reported.setdefault(sample.name, set()).add(sample.value)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_first_token_times_are_summarized_by_window_and_failures_are_counted() -> None:
    requested = [
        Asked(1.0, 0.1, None),
        Asked(4.0, 0.3, None),
        Asked(6.0, 0.2, "it broke"),
        Asked(7.0, None, "gone"),
    ]
    moments = [Moment(0.5, 1, 0, 0, 1), Moment(1.0, 1, 0, 0, 1), Moment(1.5, 1, 1, 0, 2)]
    found = summary(Seen(moments, requested))
    assert (found["requests"], found["failed"]) == (4, 2)
    assert [window["requests"] for window in found["windows"]] == [2, 1]
    assert found["windows"][0]["first_token_s"]["p50"] == pytest.approx(0.2)
    assert [moment["at_s"] for moment in found["moments"]] == [0.5, 1.5]


def test_a_load_too_small_to_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="LEAST:MOST"):
        ScaleOptions(replicas=(2, 2))
    with pytest.raises(ConfigError, match="many"):
        ScaleOptions(many=1)
    with pytest.raises(ConfigError, match="at least 97"):
        ScaleOptions(replicas=(1, 3), many=24).height(64)


def test_the_default_load_fills_the_maximum_of_replicas() -> None:
    assert ScaleOptions(replicas=(1, 3)).height(64) == 122
    assert ScaleOptions(replicas=(1, 3), many=97).height(64) == 97
