"""`manta drafter`: describe, validate, evaluate, explain, train, adapt and deploy drafters; see cli.py."""
