"""`manta drafter deploy` replaces the drafter of a served application under load."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from manta.actors.system.host_resources import free_port
from manta.jobs.cli import app
from manta.jobs.serve.ray_environment import ServeEnvironment
from safetensors.torch import load_file, save_file
from support.engines.small_ray import small_ray
from typer.testing import CliRunner

WAIT_S = 240.0
REPLICAS = 2
PROMPTS = ("def __init__(self", "import os\n", "class Reader:\n", "    for i in range(")


def bodies() -> Iterator[dict[str, Any]]:
    """Yield greedy and sampled requests, repeatedly."""
    for i, prompt in enumerate(PROMPTS):
        common = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True}
        yield {**common, "temperature": 0}
        yield {**common, "temperature": 1.0, "seed": i}


class Served:
    """The shipped target with a drafter whose features are reversed, so that its drafts are useless."""

    def __init__(self, folder: Path, pair: tuple[Path, Path]) -> None:
        self.target, self.good = pair
        self.bad = folder / "bad"
        shutil.copytree(self.good, self.bad)
        tensors = load_file(self.bad / "model.safetensors")
        tensors["fc.weight"] = torch.flip(tensors["fc.weight"], [0]).contiguous()
        save_file(tensors, self.bad / "model.safetensors")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        args = {
            "model": str(self.target),
            "served_model_name": "small",
            "speculative_config": {"model": str(self.bad), "adaptive": False, "num_speculative_tokens": 7},
            "dtype": "float32",
            "device": "cpu",
            "max_num_seqs": 8,
            "num_pages": 256,
            "num_threads": 1,
        }
        application = {
            "name": "manta",
            "import_path": "manta.actors.replica:build_app",
            "args": args,
            "deployments": [{"name": "manta", "num_replicas": REPLICAS}],
        }
        client = _get_global_client()
        assert client is not None, "it was started"
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def ask(self, body: dict[str, Any]) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def metric(self, name: str, **labels: str) -> list[float]:
        """Return the sums of a metric over every replica that a scrape finds."""
        text = httpx.get(f"{self.url}/metrics", timeout=120).text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        lines = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
        return [float(line.rsplit(" ", 1)[1]) for line in lines]

    def drafts_with(self, model: Path) -> bool:
        return len(self.metric("dflash:drafter_info", drafter=str(model), status="up")) == REPLICAS

    @contextmanager
    def load(self, texts: dict[str, str]) -> Iterator[Counter[str]]:
        """Run four clients; return the number of right answers and the errors of others."""
        found: Counter[str] = Counter()
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                for body in bodies():
                    try:
                        is_right = self.ask(body) == texts[json.dumps(body)]
                        found["right" if is_right else "another text"] += 1
                    except Exception as error:
                        found[repr(error)] += 1

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            ended.set()
            for thread in threads:
                thread.join(WAIT_S)


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, shipped_pair: tuple[Path, Path]) -> Iterator[Served]:
    from ray import serve

    served = Served(tmp_path_factory.mktemp("served"), shipped_pair)
    environment = ServeEnvironment(plain_proxy=False)
    try:
        with small_ray(6, namespace="serve"):
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": served.port})
            served.start()
            until(lambda: httpx.get(f"{served.url}/health", timeout=120).status_code == 200)
            until(lambda: len(served.metric("vllm:generation_tokens_total")) == REPLICAS)
            yield served
            serve.shutdown()
    finally:
        environment.restore()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drafter_is_replaced_under_load_and_answers_stay_the_same(served: Served) -> None:
    from ray._private.state import actors

    def pids() -> set[int]:
        return {a["Pid"] for a in actors().values() if a["ActorClassName"].startswith("ServeReplica")}

    texts = {json.dumps(body): served.ask(body) for body in bodies()}
    before = pids()
    with served.load(texts) as found:
        for model in (served.good, served.bad, served.good):
            done = CliRunner().invoke(app, ["drafter", "deploy", str(model)])
            assert done.exit_code == 0, done.output
            until(partial(served.drafts_with, model))
    assert set(found) == {"right"} and found["right"] > 20, found
    assert pids() == before, "no replica was replaced"
