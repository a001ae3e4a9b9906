"""`manta dashboards`: Grafana dashboards and Prometheus alerts, checked against the catalogue of metrics.

Panels and rules are data (`boards.yaml`, `alerts.yaml`); `dashboards.py` makes Grafana's JSON from them.
"""
