"""`manta drafter eval`. Start with `evaluate_drafter.py`."""
