"""What a Ray Serve replica needs besides HTTP: lifecycle, autoscaling, live settings, canaries. Start with
`replica_lifecycle.py`."""
