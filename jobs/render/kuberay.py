"""KubeRay's RayService, which serves, and RayJob, which runs a dataset, as plain data.

KubeRay gives Ray's containers /dev/shm, where plans travel, and probes of the raylet; said here is what it
cannot know: GPUs, the environment of HAProxy, and when a node's proxy is ready.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from ..flags import ENGINE_OPTIONS
from .deployment import Deployment, Engines
from .pins import ENVIRONMENT, ray_version

Spec = dict[str, Any]  # Any: Kubernetes' YAML

# A stream may be as long as Serve waits for one (`GRACEFUL_SHUTDOWN_S` of actors/replica.py); an engine of a
# job gives its rows back and goes.
SERVICE_GRACE_S, JOB_GRACE_S = 900, 120
HEAD = {"cpu": "4", "memory": "16Gi"}
# Of a worker, for each of its GPUs; without one, of the node. A replica, its workers and what loads weights.
PER_GPU_CPUS, PER_GPU_GIB = 8, 64
CPU_NODE = {"cpu": "8", "memory": "32Gi"}


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(document: Spec, head: str) -> str:
    """With `head` as comment lines before it."""
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110)


def ray_service(deployment: Deployment, image: str) -> Spec:
    """Serves the config; a change of it makes a new cluster beside the old one, which ends its streams."""
    config = yaml.dump(deployment.behind_a_service(), Dumper=_Dumper, sort_keys=False)
    cluster = _cluster(deployment, image, SERVICE_GRACE_S, serves=True)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": deployment.name},
        "spec": {
            "upgradeStrategy": {"type": "NewCluster"},
            "rayClusterDeletionDelaySeconds": SERVICE_GRACE_S,
            "serveConfigV2": config,
            "rayClusterConfig": cluster,
        },
    }


def ray_job(deployment: Deployment, image: str, batch_flags: Sequence[str]) -> Spec:
    """Runs `manta batch` on a cluster of its own; each retry goes on where the last one was ended.

    Args:
        batch_flags: of the command, beside those of the engine.
    """
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": f"{deployment.name}-batch"},
        "spec": {
            "submissionMode": "K8sJobMode",
            "entrypoint": batch_command(deployment.engines[0], batch_flags),
            "backoffLimit": 3,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 3600,
            "rayClusterSpec": _cluster(deployment, image, JOB_GRACE_S, serves=False),
        },
    }


def batch_command(engines: Engines, batch_flags: Sequence[str]) -> str:
    """`manta batch` with the engine's settings as flags, since the file is not in the container."""
    words = ["manta", "batch"]
    for name, value in engines.args.items():
        if name in ENGINE_OPTIONS and value is not None:
            words += _flag(name, value)
    fewest = max(engines.least, 1)
    count = str(fewest) if fewest == engines.most else f"{fewest}:{engines.most}"
    return shlex.join([*words, "--concurrency", count, *batch_flags])


def _flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


def _cluster(deployment: Deployment, image: str, grace_s: int, *, serves: bool) -> Spec:
    scales = deployment.least_nodes != deployment.most_nodes
    ports = {"gcs": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
    ports |= {"serve": deployment.port} if serves else {}
    head = {
        "name": "ray-head",
        "image": image,
        "env": _env(),
        "ports": _ports(ports),
        "resources": _sized(HEAD),
    }
    worker = {"name": "ray-worker", "image": image, "env": _env(), "resources": _sized(_node(deployment))}
    if serves:
        ready = {"httpGet": {"path": "/-/healthz", "port": deployment.port}, "periodSeconds": 5}
        worker |= {
            "ports": _ports({"serve": deployment.port}),
            "readinessProbe": ready | {"failureThreshold": 2},
        }
    group: Spec = {
        "groupName": "gpu" if deployment.node_gpus else "cpu",
        "replicas": deployment.least_nodes,
        "minReplicas": deployment.least_nodes,
        "maxReplicas": deployment.most_nodes,
        "rayStartParams": {},
        "template": {"spec": {"terminationGracePeriodSeconds": grace_s, "containers": [worker]}},
    }
    if deployment.node_gpus:
        tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        group["template"]["spec"]["tolerations"] = [tolerated]
    return {
        "rayVersion": ray_version(),
        "authOptions": {"mode": "token"},
        **({"enableInTreeAutoscaling": True} if scales else {}),
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # engines go to the workers
            "template": {"spec": {"containers": [head]}},
        },
        "workerGroupSpecs": [group],
    }


def _node(deployment: Deployment) -> dict[str, str]:
    gpus = deployment.node_gpus
    if not gpus:
        return CPU_NODE
    sizes = {"cpu": str(PER_GPU_CPUS * gpus), "memory": f"{PER_GPU_GIB * gpus}Gi"}
    return {**sizes, "nvidia.com/gpu": str(gpus)}


def _sized(resources: dict[str, str]) -> Spec:
    return {"limits": dict(resources), "requests": dict(resources)}


def _ports(ports: dict[str, int]) -> list[Spec]:
    return [{"containerPort": port, "name": name} for name, port in ports.items()]


def _env() -> list[Spec]:
    token = {"name": "hf-token", "key": "token", "optional": True}
    plain = [{"name": name, "value": value} for name, value in ENVIRONMENT.items()]
    return [*plain, {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}}]
