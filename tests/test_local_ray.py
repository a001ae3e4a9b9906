"""A Ray that is started here: its token is its user's alone, and others of that user join it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys, subprocess
from manta.jobs.ray_session import join_or_start_ray, join_ray
import ray
if len(sys.argv) > 1:
    join_ray(sys.argv[1], log_to_driver=False)
    print("joined", ray.util.get_node_ip_address())
else:
    assert join_or_start_ray(num_cpus=1, log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    print("started", address.rpartition(":")[0], flush=True)
    subprocess.run([sys.executable, "-c", sys.stdin.read(), address], check=True)
"""


@pytest.mark.parametrize("was", [None, 0o644])
def test_the_token_is_private_and_opens_the_ray_for_its_user(was: int | None, tmp_path: Path) -> None:
    token = tmp_path / ".ray/auth_token"
    if was is not None:
        token.parent.mkdir()
        token.write_text("f" * 64)
        token.chmod(was)
    names = ("RAY_AUTH_MODE", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", START],
        input=START,
        env={**environment, "HOME": str(tmp_path), "RAY_TMPDIR": f"/tmp/mr-{os.getpid()}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.split() == ["started", "127.0.0.1", "joined", "127.0.0.1"], done.stderr
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    assert (token.read_text() == "f" * 64) == (was is not None)
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
