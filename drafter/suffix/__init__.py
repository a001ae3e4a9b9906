"""Suffix decoding: drafts copied from earlier text by a suffix automaton, alone or mixed with a drafter's.

Read `suffix_automaton.py` first, then `proposer.py` and `mixing.py`.
"""
