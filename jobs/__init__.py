"""Begins and ends: the command line, serving, batch jobs, benchmarks, training."""
