"""What every request passes through: ids, keys, limits. Start with `request_gate.py`."""
