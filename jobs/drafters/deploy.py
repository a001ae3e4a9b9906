"""Replaces the drafter of a running application, through the `user_config` of its deployment.

An application deployed from a Serve config is redeployed with the changed `user_config`, as `serve deploy` of
the edited file would do. One that `manta serve` started has no config file; there `UserConfigStore` keeps it.
"""

from __future__ import annotations

from typing import Any

from ...cluster.errors import MantaError
from ..common.ray_session import join_ray, ray_address


def deploy_drafter(application: str, deployment: str, drafter: str) -> None:
    """Set `user_config` to this drafter. Raises MantaError without such a deployment."""
    connect()
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from ...actors.serve.user_config import ReplicaUserConfig, UserConfigStore

    user_config = {"drafter": drafter}
    ReplicaUserConfig.of(user_config)
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        raise MantaError("Ray Serve is not running in this Ray cluster.")
    known = client.get_serve_details()["applications"]
    if deployment not in known.get(application, {}).get("deployments", {}):
        names = [f"{app}/{name}" for app, found in known.items() for name in found["deployments"]]
        raise MantaError(
            f"There is no deployment {application}/{deployment} in this Ray cluster; there are: "
            f"{', '.join(names) or 'none'}. Choose one with --app and --deployment."
        )
    config = known[application]["deployed_app_config"]
    if config is None:
        return UserConfigStore(application, deployment).write(user_config)
    _set_user_config(config, deployment, user_config)
    configs = [each["deployed_app_config"] for each in known.values()]
    applications = [each for each in configs if each is not None]
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": applications}))


def _set_user_config(config: dict[str, Any], deployment: str, user_config: dict[str, Any]) -> None:
    """Change an application's Serve config. Any: Serve's own."""
    deployments = config.setdefault("deployments", [])
    mine = next((each for each in deployments if each["name"] == deployment), None)
    if mine is None:
        deployments.append({"name": deployment, "user_config": user_config})
    else:
        mine["user_config"] = user_config


def connect() -> None:
    """Connect to the Ray cluster of this node or of RAY_ADDRESS. Raises MantaError if there is none."""
    import ray

    if ray.is_initialized():
        return
    try:
        join_ray(ray_address() or "auto", namespace="serve", log_to_driver=False)
    except ConnectionError as error:
        raise MantaError(
            f"No Ray cluster runs here ({error}). Run this on a node of the cluster, or set RAY_ADDRESS."
        ) from None
