"""`manta bench sweep`: draft lengths and methods against plain decoding, by load; see sweep_run.py."""
