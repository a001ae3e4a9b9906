"""A real S3 server (moto) in its own process, and outputs in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manta.actors.batch.dataset.storage import Storage

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "manta",
    "AWS_SECRET_ACCESS_KEY": "manta",
    "AWS_EC2_METADATA_DISABLED": "true",
}
SERVE = """
from moto.server import ThreadedMotoServer
import sys
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class S3Server:
    """An S3 server at an address `host:port`, which logs its requests."""

    address: str
    log: Path

    def url(self, path: str, query: str = "") -> str:
        return f"s3://{path}?scheme=http&endpoint_override={self.address}&region=us-east-1{query}"

    def post(self, path: str, content: bytes) -> None:
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"http://{self.address}{path}", content, headers)
        urllib.request.urlopen(request).close()

    def requests(self, kind: str) -> list[str]:
        """Return the paths of requests with these HTTP methods so far."""
        return re.findall(rf"{kind} (/bucket\S*) HTTP", self.log.read_text())


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that lives as long as this context."""
    os.environ.update(CREDENTIALS)
    with tempfile.NamedTemporaryFile(prefix="manta-s3-") as log:
        command = [sys.executable, "-c", SERVE]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with subprocess.Popen(command, text=True, **pipes) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            try:
                yield S3Server(f"127.0.0.1:{int(server.stdout.readline())}", Path(log.name))
            finally:
                server.stdin.close()
                server.kill()


def s3_url(server: S3Server, bucket: str) -> str:
    """Return the URL of an output that is in no other test."""
    return server.url(f"{bucket}/out-{uuid.uuid4().hex[:8]}")


def make_bucket(server: S3Server, bucket: str) -> None:
    url = server.url(f"{bucket}/x", "&allow_bucket_creation=true")
    Storage.open(url, field="output").filesystem.create_dir(bucket)
