"""`manta drafter validate`. Start with `validate_pair.py`."""
