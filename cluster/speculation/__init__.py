"""Chooses how many drafts each request gets, from their acceptance probabilities and the step cost. Start
with `draft_length_policy.py`.
"""
