"""Long runs of batch jobs: `soak_batch.py`."""
