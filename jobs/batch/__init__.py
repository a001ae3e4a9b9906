"""`manta batch` and `manta.data`: datasets through engines on Ray. Start at `job.py`."""
