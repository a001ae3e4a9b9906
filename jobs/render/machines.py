"""What runs a config without Kubernetes: a `ray up` cluster, a container's Dockerfile, a systemd unit."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from .deployment import Deployment
from .pins import ENVIRONMENT, pinned_requirements, ray_image

Spec = dict[str, Any]  # Any: the cluster's YAML

# AWS's names: eight H200 with 24 CPUs each, one H100 with 16, no GPU.
EIGHT_GPUS, ONE_GPU, NO_GPU = ("p5en.48xlarge", 192), ("p5.4xlarge", 16), ("m7i.4xlarge", 16)
HEAD_TYPE = "m7i.2xlarge"
# Whoever reaches a Ray without a token runs what he likes on its nodes.
TOKEN_AUTH = {"RAY_AUTH_MODE": "token"}
RAY_TOKEN, NODE_TOKEN = "~/.ray/auth_token", "/home/ray/.ray/auth_token"
# Of Serve's own: drained streams (actors/replica.py) and a little.
STOP_S = 960


def ray_up(deployment: Deployment, image: str) -> Spec:
    """A cluster of AWS's machines; the head deploys the config as soon as its Ray runs."""
    instance, cpus = _instance(deployment.node_gpus)
    exports = " ".join(f"{name}={value}" for name, value in {**ENVIRONMENT, **TOKEN_AUTH}.items())
    start = f"chmod 600 {NODE_TOKEN}; ulimit -n 65536; {exports} ray start"
    config = "/home/ray/ray_config.yaml"
    resources = {"CPU": cpus} | ({"GPU": deployment.node_gpus} if deployment.node_gpus else {})
    return {
        "cluster_name": deployment.name,
        "max_workers": deployment.most_nodes,
        "idle_timeout_minutes": 10,
        "provider": {"type": "aws", "region": "us-east-1"},
        "auth": {"ssh_user": "ubuntu"},
        "docker": {"image": image, "container_name": "manta", "run_options": ["--ulimit nofile=65536:65536"]},
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {"InstanceType": HEAD_TYPE}},
            "engines": {
                "min_workers": deployment.least_nodes,
                "max_workers": deployment.most_nodes,
                "resources": resources,
                "node_config": {"InstanceType": instance},
            },
        },
        "head_node_type": "head",
        "file_mounts": {config: str(deployment.file), NODE_TOKEN: RAY_TOKEN},
        "head_start_ray_commands": [
            "ray stop",
            f"{start} --head --port=6379 --num-cpus=0 --autoscaling-config=~/ray_bootstrap_config.yaml",
            f"RAY_AUTH_MODE={TOKEN_AUTH['RAY_AUTH_MODE']} serve deploy {config}",
        ],
        "worker_start_ray_commands": ["ray stop", f"{start} --address=$RAY_HEAD_IP:6379"],
    }


def _instance(gpus: int) -> tuple[str, int]:
    return EIGHT_GPUS if gpus > 1 else ONE_GPU if gpus else NO_GPU


def dockerfile(deployment: Deployment) -> str:
    """An image for every node: Ray's, with Manta's requirements at the versions that are installed here."""
    gpu = deployment.node_gpus > 0
    pins = " \\\n    ".join(f"'{each}'" for each in pinned_requirements(gpu=gpu))
    environment = "".join(f"ENV {name}={value}\n" for name, value in ENVIRONMENT.items())
    version = metadata.version("manta")
    return (
        "# In Manta's repository:\n"
        f"# python -m build --wheel && docker build -t manta:{version} -f Dockerfile .\n"
        "# docker run --gpus all --shm-size 16g -v ./ray_config.yaml:/etc/manta/ray_config.yaml ...\n"
        "# It listens on all addresses: give it keys (-e MANTA_API_KEY=..., or api_key_file in the config).\n"
        f"FROM {ray_image(gpu=gpu)}\n"
        f"RUN pip install --no-cache-dir \\\n    {pins}\n"
        f"COPY dist/manta-{version}-py3-none-any.whl /tmp/\n"
        f"RUN pip install --no-cache-dir --no-deps /tmp/manta-{version}-py3-none-any.whl\n"
        f"{environment}"
        f"EXPOSE {deployment.port} 8265\n"
        'CMD ["manta", "serve", "--config", "/etc/manta/ray_config.yaml", "--host", "0.0.0.0", '
        f'"--port", "{deployment.port}"]\n'
    )


def systemd_unit(deployment: Deployment) -> str:
    """`manta serve` of this Python as a service of this machine."""
    command = [str(Path(sys.executable).parent / "manta"), "serve", "--config", str(deployment.file)]
    command += ["--host", deployment.host, "--port", str(deployment.port)]
    environment = "".join(f"Environment={name}={value}\n" for name, value in TOKEN_AUTH.items())
    return (
        "# /etc/systemd/system/manta.service; `useradd --system --create-home manta` makes its user.\n"
        "# Its Ray asks for a token, made at the first start in ~manta/.ray/auth_token (mode 0600).\n"
        "# Keys for clients: api_key_file in the config, or --api-key-file here.\n"
        "[Unit]\n"
        f"Description=Manta serves {deployment.engines[0].config.model}\n"
        "Wants=network-online.target\n"
        "After=network-online.target\n"
        "\n"
        "[Service]\n"
        "User=manta\n"
        "UMask=0077\n"
        f"{environment}"
        f"ExecStart={shlex.join(command)}\n"
        "# SIGTERM to the server alone: it ends its streams, its engines and its Ray; then whoever is left.\n"
        "KillMode=mixed\n"
        f"TimeoutStopSec={STOP_S}\n"
        "Restart=on-failure\n"
        "RestartSec=5\n"
        "LimitNOFILE=65536\n"
        "LimitMEMLOCK=infinity\n"
        "TasksMax=infinity\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )
