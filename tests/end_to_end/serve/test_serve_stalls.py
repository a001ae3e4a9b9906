"""A real server of two replicas with a stopped worker: streams continue, and it is replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.servers.served import Served
from support.waiting import wait_until
from trials.serving.serving_load import Load


@pytest.mark.slow
def test_a_stopped_worker_costs_no_stream_and_its_replica_is_replaced(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {
        "model": str(pair[0]),
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
        "num_pages": 512,
        "num_threads": 1,
    }
    with Served(settings, tmp_path / "log", replicas=2) as served:
        wait_until(lambda: served.replicas_up() == 2, 240.0, "there are not two replicas")
        undisturbed = [stream.text for stream in Load(served.url, 8, 400).join()]
        load = Load(served.url, 8, 400)
        load.wait_for_tokens()
        stopped = served.pids("target worker")[0]
        os.kill(stopped, signal.SIGSTOP)
        assert [stream.text for stream in load.join()] == undisturbed
        assert "stopped by a signal or a debugger: rank 0" in (tmp_path / "log").read_text()
        wait_until(lambda: stopped not in served.pids("target worker"), 60.0, "the stopped worker is left")
        wait_until(lambda: served.replicas_up() == 2, 240.0, "no replica came in its place")
        assert served.end() == []
