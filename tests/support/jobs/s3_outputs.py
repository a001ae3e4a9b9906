"""A real S3 server (moto) in its own process, and outputs in it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from manta.actors.batch.dataset.storage import Storage

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "manta",
    "AWS_SECRET_ACCESS_KEY": "manta",
    "AWS_EC2_METADATA_DISABLED": "true",
}
SERVE = """
from moto.server import ThreadedMotoServer
import sys, time
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server that lives as long as this context."""
    os.environ.update(CREDENTIALS)
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            yield f"127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()
            server.kill()


def s3_url(server: str, bucket: str) -> str:
    return f"s3://{bucket}/out-{uuid.uuid4().hex[:8]}?scheme=http&endpoint_override={server}&region=us-east-1"


def make_bucket(server: str, bucket: str) -> None:
    Storage.open(
        f"s3://{bucket}/x?scheme=http&endpoint_override={server}&region=us-east-1&allow_bucket_creation=true",
        field="output",
    ).filesystem.create_dir(bucket)
