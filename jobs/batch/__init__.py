"""Datasets through engines: rows in, answers on disk."""
