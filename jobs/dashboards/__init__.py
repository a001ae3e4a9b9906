"""`manta dashboards`: Grafana dashboards and Prometheus alerts, made of `boards.yaml` and `alerts.yaml`."""
