"""`manta drafter train` and `adapt`. Start with `train_run.py`."""
