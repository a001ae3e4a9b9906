"""The thread team of the fused CPU pass. Start with `thread_team.py`."""
