"""Shared memory between processes: rings, channels, mailboxes. Start with `step_channel.py`."""
