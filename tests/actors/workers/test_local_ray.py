"""A Ray that is started here: only its user can read its token, and that user's processes join it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from manta.actors.system.host_resources import free_port
from manta.actors.workers.local_ray import check_address, make_token
from manta.cluster.errors import ConfigError

START = """
import os, sys, subprocess
from manta.cluster.errors import ConfigError
from manta.jobs.common.ray_session import join_or_start_ray, join_ray
import ray
if "RAY_AUTH_TOKEN" in os.environ:
    try:
        join_ray(sys.argv[1])
    except ConfigError as refused:
        print(refused.message)
elif len(sys.argv) > 1:
    join_ray(sys.argv[1], log_to_driver=False)
    print("joined", ray.util.get_node_ip_address())
else:
    assert join_or_start_ray(num_cpus=1, log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    print("started", address.rpartition(":")[0], flush=True)
    command = [sys.executable, "-c", sys.stdin.read(), address]
    subprocess.run(command, check=True)
    subprocess.run(command, env={**os.environ, "RAY_AUTH_TOKEN": "f" * 64}, check=True)
"""


CROWDED = """
import time
from manta.jobs.common.ray_session import join_or_start_ray
import ray

@ray.remote(num_cpus=0)
class Worker:
    def __init__(self):
        self.memory = bytearray(200 << 20)

    def is_alive(self):
        return True

join_or_start_ray(num_cpus=1, log_to_driver=False)
worker = Worker.remote()
assert ray.get(worker.is_alive.remote())
time.sleep(3.0)  # Ray looks four times a second
assert ray.get(worker.is_alive.remote())
"""


def test_a_full_memory_is_no_reason_to_kill_workers() -> None:
    """By Ray's own setting, one percent counts as full here."""
    environment = {**os.environ, "RAY_memory_usage_threshold": "0.01", "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory(prefix="mr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        subprocess.run(
            [sys.executable, "-c", CROWDED],
            env={**environment, "RAY_TMPDIR": folder},
            timeout=600,
            check=True,
        )


def test_the_ray_token_is_private_and_valid(tmp_path: Path) -> None:
    token = tmp_path / ".ray/auth_token"
    names = ("RAY_AUTH_MODE", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    with tempfile.TemporaryDirectory(prefix="mr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", START],
            input=START,
            env={**environment, "HOME": str(tmp_path), "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    *found, refused = done.stdout.splitlines()
    assert found == ["started 127.0.0.1", "joined 127.0.0.1"], done.stderr
    assert "that Ray refuses this user's token" in refused and "InvalidAuthToken" not in done.stderr
    assert mode_of(token) == 0o600 and len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_an_address_at_which_no_ray_answers_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127\.0\.0\.1:\d+: nothing answers there"):
        check_address(f"127.0.0.1:{free_port()}")


def test_an_existing_token_is_kept_and_made_private(tmp_path: Path) -> None:
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("mine")
    token.chmod(0o644)
    make_token(token)
    assert token.read_text() == "mine" and mode_of(token) == 0o600
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make_token, [tmp_path / "new/auth_token"] * 8))
    assert mode_of(tmp_path / "new") == 0o700 and len((tmp_path / "new/auth_token").read_text()) == 64
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH"):
        make_token(tmp_path / "file/auth_token")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
