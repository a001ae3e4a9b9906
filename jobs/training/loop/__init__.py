"""The training loop: optimizers, schedule, curves. Start with `training_loop.py`."""
