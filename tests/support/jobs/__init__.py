"""Batch and training jobs, their outputs, and processes that tests kill."""
