"""`manta drafter`: describe, validate, convert, evaluate, train, adapt and deploy drafters; see cli.py."""
