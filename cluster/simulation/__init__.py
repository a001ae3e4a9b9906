"""Simulated executors, step times and load, for the planner, simulations and tests. Start with
`simulated_executor.py`."""
