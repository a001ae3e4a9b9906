"""Parts of a Ray Serve replica besides HTTP: lifecycle, autoscaling, live settings, canaries. Start with
`replica_lifecycle.py`.
"""
