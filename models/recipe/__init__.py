"""How the shipped pair was made: `python -m manta.models.recipe -o DIR` in a clone. It is not in the wheel.

Read `pair.py` first: it has the stages in their order. Training itself is `jobs/training/`, shared with
`manta drafter train`.
"""
