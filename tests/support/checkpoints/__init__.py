"""Tiny checkpoints, pairs and tokenizers, made at random or from the shipped pair."""
