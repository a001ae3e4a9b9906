"""Two replicas behind HAProxy without a gateway, updated and killed under load."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.engines.ray_engines import actor_pids
from support.servers.deployed import REPLICA, Cluster, deployed
from support.waiting import wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with deployed(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_rolling_update_fails_no_request(cluster: Cluster) -> None:
    text, before = cluster.ask(), actor_pids(REPLICA)
    with cluster.load() as answers:
        cluster.deploy(shutdown_timeout=60)
        wait_until(lambda: len(actor_pids(REPLICA) - before) == 2, 240)
        wait_until(lambda: not actor_pids(REPLICA) & before, 240)
    assert set(answers) == {text}


@pytest.mark.slow
def test_replicas_follow_a_changed_number(cluster: Cluster) -> None:
    text, before = cluster.ask(), actor_pids(REPLICA)
    with cluster.load() as answers:
        cluster.deploy(num_replicas=1, shutdown_timeout=60)
        wait_until(lambda: len(actor_pids(REPLICA)) == 1, 240)
        (stays,) = actor_pids(REPLICA)
        cluster.deploy(num_replicas=2, shutdown_timeout=60)
        wait_until(lambda: len(cluster.replicas()) == 2, 240, poll_s=0.1)
    assert set(answers) == {text}
    assert stays in before and stays in actor_pids(REPLICA), "it was not replaced"


@pytest.mark.slow  # `test_serve_gateway.py` has a shorter form
def test_only_a_dead_engines_own_streams_get_an_error(cluster: Cluster) -> None:
    cluster.deploy({"drafter": "/nowhere/at/all"})  # is refused, and keeps no replica from starting
    text, before = cluster.ask(), actor_pids(REPLICA)
    wait_until(lambda: len(cluster.replicas()) == 2, 240, poll_s=0.1)
    with cluster.load() as answers:
        wait_until(lambda: len(answers) > 3)
        os.kill(min(actor_pids("TargetWorker")), signal.SIGKILL)
        wait_until(lambda: bool(actor_pids(REPLICA) - before), 240)
        wait_until(lambda: len(cluster.replicas()) == 2, 240, poll_s=0.1)
    assert set(answers) <= {text, "error event"}
    assert answers.count("error event") <= 3, "each client had one stream there"
