"""The RayJob that the documentation ships: its command is one that `manta` takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from manta.jobs.cli import app

DOCS = Path(__file__).resolve().parent.parent / "docs"


def parsed(command: list[str]) -> dict[str, Any]:
    """The parameters of a `manta` command, which is not run; click raises for what it does not take."""
    name, *subcommand = command
    assert name == "manta"
    group: Any = typer.main.get_command(app)
    return group.commands[subcommand[0]].make_context(subcommand[0], subcommand[1:]).params


def test_the_entrypoint_of_the_ray_job_is_a_batch_command() -> None:
    job = yaml.safe_load((DOCS / "ray-job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    found = parsed(shlex.split(spec["entrypoint"]))
    assert found["output"].startswith("s3://") and found["model"] and found["spec_model"]
    _, most = found["concurrency"].split(":")
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["maxReplicas"] == int(most)
    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0", "engines go to workers"


def test_an_unknown_flag_would_be_seen() -> None:
    with pytest.raises(Exception, match=r"--prompt-columm"):
        parsed(["manta", "batch", "-m", "x", "-i", "a", "-o", "b", "--prompt-columm", "c"])


def test_the_commands_of_the_guide_are_real() -> None:
    text = (DOCS / "batch.md").read_text()
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)).replace("\\\n", " ")
    commands = [line.partition("manta ")[2] for line in blocks.splitlines() if "manta batch" in line]
    assert len(commands) > 5
    for command in commands:
        parsed(["manta", *shlex.split(command, comments=True)])
