"""The seam of scheduler and executor: a step's plan, result and limits. Start with `scheduler_output.py`."""
