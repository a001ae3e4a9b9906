"""`manta drafter deploy` replaces the drafter of a served application under load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from manta.jobs.cli import app
from safetensors.torch import load_file, save_file
from support.servers.deployed import BODY, REPLICA, Cluster, deployed
from support.waiting import wait_until
from typer.testing import CliRunner

PROMPTS = ("def __init__(self", "import os\n", "class Reader:\n", "    for i in range(")
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 1.0, "seed": 1})
BODIES = [{**BODY, "prompt": p, "max_tokens": 16, **sampling} for p in PROMPTS for sampling in SAMPLINGS]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory, shipped_pair: tuple[Path, Path]) -> Path:
    """The shipped drafter with its features reversed, so that its drafts are useless."""
    folder = shutil.copytree(shipped_pair[1], tmp_path_factory.mktemp("drafters") / "bad")
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = torch.flip(tensors["fc.weight"], [0]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, shipped_pair: tuple[Path, Path], bad: Path
) -> Iterator[Cluster]:
    spec = {"model": str(bad), "adaptive": False, "num_speculative_tokens": 7}
    target = str(shipped_pair[0])
    with deployed(tmp_path_factory.mktemp("served"), model=target, speculative_config=spec) as cluster:
        yield cluster


def drafts_with(cluster: Cluster, model: Path) -> bool:
    """Return whether both replicas report this drafter."""
    lines = httpx.get(f"{cluster.url}/metrics", timeout=600).text.splitlines()
    labels = ("dflash:drafter_info{", f'drafter="{model}"', 'status="up"')
    return sum(all(label in line for label in labels) for line in lines) == 2


@pytest.mark.slow
def test_a_drafter_is_replaced_under_load_and_answers_stay_the_same(
    cluster: Cluster, shipped_pair: tuple[Path, Path], bad: Path
) -> None:
    texts, before, good = [cluster.ask(body) for body in BODIES], cluster.pids(REPLICA), shipped_pair[1]
    with cluster.load(lambda: json.dumps([cluster.ask(body) for body in BODIES])) as rounds:
        for model in (good, bad, good):
            done = CliRunner().invoke(app, ["drafter", "deploy", str(model)])
            assert done.exit_code == 0, done.output
            wait_until(partial(drafts_with, cluster, model))
        wait_until(lambda: len(rounds) > 2)
    assert set(rounds) == {json.dumps(texts)}
    assert cluster.pids(REPLICA) == before, "no replica was replaced"
