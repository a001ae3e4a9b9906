"""`manta render`: files that deploy a `ray_config.yaml` to KubeRay, `ray up`, a container or systemd."""
