"""Two replicas deployed by a Serve config, as with `serve deploy`, for tests that update or kill them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from manta.actors.haproxy.config_rewriter import GATEWAY
from manta.actors.system.host_resources import free_port
from manta.jobs.serve.ray_environment import ServeEnvironment
from prometheus_client.parser import text_string_to_metric_families

from support.checkpoints.text_pair import VOCAB, make_text_pair, tiny_settings
from support.checkpoints.tiny import make_tiny_drafter
from support.engines.small_ray import small_ray
from support.waiting import WAIT_S, wait_until

BODY = {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
REPLICA = "ServeReplica:manta:manta"  # the class of an engine's replica, in Ray's list of actors


class Cluster:
    """Two replicas of a tiny pair behind HAProxy; `deploy` does what `serve deploy` does.

    Args:
        folder: for the checkpoints.
        args: further settings, as under `args:` in ray_config.yaml.
    """

    def __init__(self, folder: Path, **args: Any) -> None:  # Any: settings
        self._args = args
        self.target, self.drafter = make_text_pair(folder)
        self.other_drafter = make_tiny_drafter(folder / "other", vocab_size=VOCAB, seed=2)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(
        self,
        user_config: dict[str, Any] | None = None,
        *,
        num_replicas: int = 2,
        num_gateways: int | None = None,
        **changed: Any,
    ) -> None:
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        sizes = {"max_num_seqs": 8, "num_pages": 256}
        args = tiny_settings((self.target, self.drafter), **{**sizes, **self._args, **changed})
        deployment = {"name": "manta", "num_replicas": num_replicas, "user_config": user_config or {}}
        deployments = [deployment]
        if num_gateways is not None:
            deployments.append({"name": GATEWAY, "num_replicas": num_gateways})
        application = {
            "name": "manta",
            "import_path": "manta.actors.replica:build_app",
            "args": args,
            "deployments": deployments,
        }
        client = _get_global_client()
        assert client is not None, "Serve runs"
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def pids(self, kind: str) -> set[int]:
        from ray._private.state import actors  # the public listing needs the dashboard

        return {
            actor["Pid"]
            for actor in actors().values()
            if actor["ActorClassName"].startswith(kind) and actor["State"] == "ALIVE"
        }

    def logged(self, words: str) -> int:
        """Return how often the replicas have logged these words."""
        from ray._private import worker

        node = worker.global_worker.node
        assert node is not None, "Ray runs"
        logs = Path(node.get_logs_dir_path()).glob("worker-*.err")
        return sum(log.read_text(errors="replace").count(words) for log in logs)

    def replicas(self) -> dict[str, float]:
        """Return the tokens that each replica has generated, by the server's own metrics.

        Waits while an answer has none of them, as when no replica could be read.
        """
        found: dict[str, float] = {}

        def scrape() -> bool:
            families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text)
            samples = (s for each in families if each.name == "vllm:generation_tokens" for s in each.samples)
            found.update({s.labels["replica"]: s.value for s in samples if s.name.endswith("_total")})
            return bool(found)

        wait_until(scrape, what="/metrics names no replica", poll_s=0.1)
        return found

    def ask(self, body: Mapping[str, Any] = BODY) -> str:
        """Return the text of a stream, or its error."""
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600)
        except httpx.HTTPError as error:
            return f"failed: {type(error).__name__}"
        if answer.status_code != 200:
            return f"failed: {answer.status_code} {answer.text[:200]}"
        *events, last = [line[6:] for line in answer.text.splitlines() if line]
        chunks = [json.loads(event) for event in events]
        if last != "[DONE]" or any("error" in chunk for chunk in chunks):
            return "error event" if last == "[DONE]" else "failed: cut"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    @contextmanager
    def load(self, ask: Callable[[], str] | None = None) -> Iterator[list[str]]:
        """Keep three clients streaming; yield the list of their answers, complete after the block."""
        answers: list[str] = []
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                answers.append((ask or self.ask)())

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            ended.set()
            for thread in threads:
                thread.join(WAIT_S)


@contextmanager
def deployed(folder: Path, **args: Any) -> Iterator[Cluster]:  # Any: settings
    """Start Ray, Serve and a `Cluster`; yield it when both replicas answer."""
    from ray import serve

    cluster = Cluster(folder, **args)
    environment = ServeEnvironment(plain_proxy=False)
    try:
        with small_ray(6, namespace="serve"):
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": cluster.port})
            cluster.deploy()
            wait_until(lambda: len(cluster.pids(REPLICA)) == 2)
            wait_until(lambda: httpx.get(f"{cluster.url}/health", timeout=WAIT_S).status_code == 200)
            wait_until(lambda: len(cluster.replicas()) == 2)
            yield cluster
            serve.shutdown()
    finally:
        environment.restore()
