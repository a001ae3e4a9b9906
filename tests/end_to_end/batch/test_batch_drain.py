"""An engine on a node that is about to be removed (a spot notice) leaves in time and repeats no row.

A real cluster of two nodes, and Ray's own notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private import worker as ray_worker
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from support.checkpoints.text_pair import make_text_pair
from support.jobs.batch_outputs import read_results
from support.jobs.chaos_job import ChaosJob, write_rows

NUM_ROWS = 500
SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    nodes = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
    nodes.add_node(**SMALL)
    nodes.connect()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_an_engine_leaves_a_node_that_is_about_to_be_removed(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = make_text_pair(tmp_path)
    write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    counter = tmp_path / "counter"
    job = ChaosJob(
        model=str(model),
        input=str(tmp_path / "rows.jsonl"),
        folder=str(tmp_path),
        concurrency="2",
    )
    thread = threading.Thread(target=job.run)
    thread.start()
    while not counter.exists() or counter.stat().st_size < NUM_ROWS:
        assert thread.is_alive()
        time.sleep(0.02)
    (node,) = cluster.worker_nodes
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 120) * 1000)
    reported, why = ray_worker.global_worker.gcs_client.drain_node(node.node_id, reason, "spot", deadline_ms)
    assert reported, why
    thread.join(600)
    assert not thread.is_alive()
    assert "its node is about to leave the cluster" in capsys.readouterr().err
    rows = read_results(tmp_path / "out")
    assert len({row["id"] for row in rows}) == len(rows) == NUM_ROWS
    assert counter.stat().st_size == NUM_ROWS * job.max_tokens  # what ran was finished
