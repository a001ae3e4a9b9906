"""Simulations that justify our own policies: autoscaling over a day of traffic, and adaptive speculation.

They play the simulated engines of `manta simulate node` (`jobs/simulate/`). Begin with `cli.py`.
"""
