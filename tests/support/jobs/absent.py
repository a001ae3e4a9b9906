"""Run a command in a process in which packages are absent: neither importable nor with a version."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from support.paths import ROOT

# Ray, all of HTTP and all of text: what a GPU machine need not have for its kernels to be examined and timed.
# pydantic is not among them: it reads config.json.
NEITHER_RAY_NOR_HTTP = (
    *("ray", "fastapi", "starlette", "uvicorn", "openai", "orjson", "aiohttp", "httpx", "grpc"),
    *("prometheus_client", "opentelemetry", "transformers", "tokenizers", "huggingface_hub"),
    "llguidance",
)
_SCRIPT = """
import importlib.metadata as metadata, sys

absent = set(sys.argv[1].split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, known=metadata.version):
    if name in absent:
        raise metadata.PackageNotFoundError(name)
    return known(name)

sys.meta_path.insert(0, Absent())
metadata.version = version
from manta.jobs.cli import main
main(sys.argv[2:])
"""


def run_without(
    packages: Sequence[str], arguments: Sequence[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `manta` with these arguments; an empty variable is removed from the environment."""
    everything = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT, ",".join(packages), *arguments],
        env={name: value for name, value in everything.items() if value},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
