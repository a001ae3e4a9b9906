"""Which document a kind is, with the lines on top that say how to use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...cluster.errors import ConfigError
from .deployment import read_deployment
from .kuberay import as_yaml, ray_job, ray_service
from .machines import dockerfile, ray_up, systemd_unit
from .pins import own_image

_SECRET = "kubectl create secret generic hf-token --from-literal=token=hf_...     # for gated models"
_SERVICE = f"""\
{_SECRET}
kubectl apply -f FILE && kubectl get rayservice {{name}}
The endpoint: service {{name}}-serve-svc, port {{port}}. Image: `manta render dockerfile`. Folders of models
must be in the image or on a volume that all pods see; hub ids are downloaded."""
_JOB = f"""\
{_SECRET}
kubectl apply -f FILE && kubectl get rayjob {{name}}-batch
Input and output are URLs, or paths that all pods see. A job that ended early goes on where it stopped when
the same command runs again: that is what backoffLimit does here."""
_RAY_UP = """\
ray get-auth-token --generate > /dev/null && chmod 600 ~/.ray/auth_token    # once: the token of all nodes
ray up FILE; then ray attach FILE, RAY_AUTH_MODE=token serve status. Provider, region and instances are AWS's:
put in yours. Ray's ports (6379, 8265, 10001; 8080 for metrics, which asks for no token) are for the nodes
alone: open them in no security group."""


def render_document(
    kind: str, config: Path, gpus_per_node: int | None, image: str | None, batch_flags: Sequence[str]
) -> str:
    """The text of a file; ConfigError or PlacementError says what of the config is wrong."""
    if bool(batch_flags) != (kind == "kuberay-job"):
        raise ConfigError(
            "kuberay-job, and it alone, needs the flags of `manta batch` behind --: manta render kuberay-job "
            "-- --input s3://bucket/in/*.parquet --output s3://bucket/out --prompt-column question",
            param="batch_flags",
        )
    deployment, image = read_deployment(config, gpus_per_node), image or own_image()
    names = {"name": deployment.name, "port": deployment.port}
    match kind:
        case "kuberay-service":
            return as_yaml(ray_service(deployment, image), _SERVICE.format(**names))
        case "kuberay-job":
            return as_yaml(ray_job(deployment, image, batch_flags), _JOB.format(**names))
        case "ray-up":
            return as_yaml(ray_up(deployment, image), _RAY_UP)
        case "dockerfile":
            return dockerfile(deployment)
        case _:
            return systemd_unit(deployment)
