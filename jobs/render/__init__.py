"""`manta render`: what runs a `ray_config.yaml` elsewhere: KubeRay, `ray up`, a container, systemd."""
