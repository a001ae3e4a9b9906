"""Estimates which layouts of a model pair fit a node's GPUs and how fast each would be, and chooses one.

Pure arithmetic on shapes and rates (`cluster/hardware/`): nothing here reads a checkpoint or measures. Called
by `jobs/plan/`.
"""
