"""`/v1/files` and `/v1/batches` without HTTP. Start with `batch_service.py`."""
