"""Benchmarks that users run on their own models (`manta bench`); read cli.py first."""
