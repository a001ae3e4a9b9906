"""`manta drafter explain`: why few drafts are accepted. Start with `explain_drafter.py`."""
