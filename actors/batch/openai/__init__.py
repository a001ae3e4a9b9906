"""`/v1/files` and `/v1/batches` without HTTP: stored files and the batches run over them. Start with
`batch_service.py`."""
