"""The engine core: schedules, executes and commits steps on any executor. Start with `engine_core.py`."""
