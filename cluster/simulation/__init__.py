"""Simulated executors and load, for planner, simulations and tests. Start with `simulated_executor.py`."""
