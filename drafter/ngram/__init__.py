"""Prompt look-up: drafts copied from a sequence's own tokens, without a model."""
