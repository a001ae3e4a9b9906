"""`manta dashboards`: Grafana's dashboards and Prometheus's alerts, checked against the catalogue of metrics.

Panels and rules are data (`boards.yaml`, `alerts.yaml`); `boards.py` makes Grafana's JSON of them.
"""
