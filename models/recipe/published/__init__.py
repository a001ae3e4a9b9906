"""The prompts from which a drafter for SmolLM2-135M-Instruct is trained, and the target's answers to them.

`python -m manta.models.recipe.published` in a clone makes them; it is not in the wheel. Read `prompts.py`
first.
"""
