"""Several replicas: routing, placement on nodes, autoscaling, drafter canaries. Start with `router.py`."""
