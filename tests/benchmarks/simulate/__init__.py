"""Simulations that test Manta's policies: autoscaling over a day of traffic, and adaptive speculation.

They use the simulated engines of `manta simulate node` (`jobs/simulate/`). Begin with `cli.py`.
"""
