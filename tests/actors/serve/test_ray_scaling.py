"""Our policy in Serve's own machinery, without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from manta.actors.http.config.settings import parse_replicas
from manta.actors.serve.autoscaling_policy import POLICY, SpeculativeScaling, scaling_options
from manta.cluster.errors import ConfigError
from manta.cluster.fleet.autoscaling import ReplicaStats, ScalingRules
from ray.serve import autoscaling_policy as rays
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext

FULL = ReplicaStats(running=8, max_num_seqs=8, decode_tokens_per_s=100.0).as_dict()


def context(config: AutoscalingConfig, now_s: float, **known: Any) -> AutoscalingContext:
    """Return a replica id as the controller makes it."""
    blank: dict[str, Any] = {
        "deployment_id": DeploymentID("manta"),
        "deployment_name": "manta",
        "app_name": "manta",
        "running_replicas": [],
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": {},
        "raw_metrics": {},
        "capacity_adjusted_min_replicas": config.min_replicas,
        "capacity_adjusted_max_replicas": config.max_replicas,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
    }
    return AutoscalingContext(**{**blank, **known}, current_time=now_s, config=config)


def heard(now_s: float, *replicas: dict[str, float]) -> dict[str, dict[str, list[TimeStampedValue]]]:
    """Return raw metrics: one point of each value of each replica."""
    return {
        name: {f"r{i}": [TimeStampedValue(now_s, figures[name])] for i, figures in enumerate(replicas)}
        for name in replicas[0]
    }


def served(**changed: Any) -> tuple[AutoscalingConfig, Callable[[AutoscalingContext], tuple[int, Any]]]:
    """Return the policy as in the controller: pickled, loaded there, within Serve's bounds and delays."""
    config = AutoscalingConfig(**{**scaling_options(0, 9, ScalingRules())["autoscaling_config"], **changed})
    policy = config.policy.from_serialized_policy_def(
        {"policy_function": POLICY, "policy_kwargs": config.policy.policy_kwargs},
        config.policy.get_serialized_policy_def() or b"",
    )
    return config, rays._apply_autoscaling_config(_resolve_policy_callable(policy))


def test_serve_follows_the_policy_up_and_down_to_zero() -> None:
    config, policy = served()
    target, seen = 1, []
    for now_s in range(1300):
        load = (
            heard(now_s, FULL) if now_s < 10 else heard(now_s, *[{**FULL, "running": 0.0}] * max(1, target))
        )
        there = target if now_s > 10 else 1  # replicas need ten seconds to start
        target, state = policy(
            context(
                config, float(now_s), current_num_replicas=there, target_num_replicas=target, raw_metrics=load
            )
        )
        assert not set(state) & {"load"}, "ours remembers by itself"
        seen.append(target)
    assert seen[1] == 1 and seen[5] == 2, "after up_after_s, and only once while it starts"
    assert list(dict.fromkeys(seen)) == [1, 2, 0]  # 2, 1, 0 in the order of coming
    assert seen[-1] == 0


@pytest.mark.parametrize(("num_replicas", "num_requests", "wanted"), [(3, 0.0, 3), (0, 1.0, 1)])
def test_nothing_changes_before_replicas_report_but_the_first_request_starts_one(
    num_replicas: int, num_requests: float, wanted: int
) -> None:
    config, policy = served()
    there = {"current_num_replicas": num_replicas, "target_num_replicas": num_replicas}
    assert policy(context(config, 0.0, **there, total_num_requests=num_requests))[0] == wanted


def test_wrong_scaling_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean policy_kwargs\.load_high"):
        SpeculativeScaling(load_hig=0.7)
    with pytest.raises(ConfigError, match="load_low"):
        SpeculativeScaling(load_low=0.9)


@pytest.mark.parametrize("replicas", [0, "0", "4:1", "a", "1:", True, "-1:2"])
def test_impossible_numbers_of_replicas_are_refused(replicas: Any) -> None:
    with pytest.raises(ConfigError, match="least:most"):
        parse_replicas(replicas)


def test_a_fixed_number_is_serves_own_setting_and_a_range_uses_the_policy() -> None:
    assert scaling_options(*parse_replicas(3), ScalingRules()) == {"num_replicas": 3}
    config = AutoscalingConfig(
        **scaling_options(*parse_replicas("0:4"), ScalingRules(load_high=0.9))["autoscaling_config"]
    )
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 4)
    assert config.look_back_period_s > config.metrics_interval_s == 1.0
    assert config.upscale_delay_s == config.downscale_delay_s == 0.0
    assert config.policy.policy_function == POLICY
    assert config.policy.policy_kwargs["load_high"] == 0.9
