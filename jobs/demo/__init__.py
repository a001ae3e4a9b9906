"""`manta demo`: a published pair served and compared by the commands of a user. Start with `demo_run.py`."""
