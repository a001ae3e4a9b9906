"""`sweep`: draft lengths and methods against plain decoding, by load. Start with policy_sweep.py."""
