"""The recipe of the shipped pair: `python -m manta.models.recipe -o DIR` in a clone. It is not in the wheel.

Read `pair.py` first: it has the stages in their order. The training itself is in `jobs/training/`, which
`manta drafter train` uses too.
"""
