"""Two replicas behind HAProxy without a gateway, updated and killed under load."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.servers.deployed import REPLICA, Cluster, deployed, until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with deployed(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_rolling_update_fails_no_request(cluster: Cluster) -> None:
    text, before = cluster.ask(), cluster.pids(REPLICA)
    with cluster.load() as answers:
        cluster.deploy(shutdown_timeout=60)
        until(lambda: len(cluster.pids(REPLICA) - before) == 2)
        until(lambda: not cluster.pids(REPLICA) & before)
    assert set(answers) == {text}


@pytest.mark.slow
def test_replicas_follow_a_changed_number(cluster: Cluster) -> None:
    text, before = cluster.ask(), cluster.pids(REPLICA)
    with cluster.load() as answers:
        cluster.deploy(num_replicas=1, shutdown_timeout=60)
        until(lambda: len(cluster.pids(REPLICA)) == 1)
        (stays,) = cluster.pids(REPLICA)
        cluster.deploy(num_replicas=2, shutdown_timeout=60)
        until(lambda: len(cluster.replicas()) == 2)
    assert set(answers) == {text}
    assert stays in before and stays in cluster.pids(REPLICA), "it was not replaced"


@pytest.mark.slow  # `test_serve_gateway.py` has a shorter form
def test_only_a_dead_engines_own_streams_get_an_error(cluster: Cluster) -> None:
    cluster.deploy({"drafter": "/nowhere/at/all"})  # is refused, and keeps no replica from starting
    text, before = cluster.ask(), cluster.pids(REPLICA)
    until(lambda: len(cluster.replicas()) == 2)
    with cluster.load() as answers:
        until(lambda: len(answers) > 3)
        os.kill(min(cluster.pids("TargetWorker")), signal.SIGKILL)
        until(lambda: bool(cluster.pids(REPLICA) - before))
        until(lambda: len(cluster.replicas()) == 2)
    assert set(answers) <= {text, "error event"}
    assert answers.count("error event") <= 3, "each client had one stream there"
