"""The factors of branches are accepted tokens per expected token, whatever the factors were before."""

from __future__ import annotations

import numpy as np
from manta.cluster.speculation.branch_model import BranchModel
from manta.cluster.step.scheduler_output import TreeOutcome, TreeShape

NONE, NO_PATH = np.zeros(1, np.int32), np.zeros((1, 0), np.int32)


def outcome(shape: TreeShape, actual: np.ndarray) -> TreeOutcome:
    """Of steps in which the estimates without factors are 0.5."""
    estimates = 0.5 * np.array((*shape.factors, shape.fork))
    chances = estimates.astype(np.float32), actual.astype(np.float32)
    return TreeOutcome(NONE, NONE, NO_PATH, *chances, NONE, NONE)


def test_factors_become_the_quotient_of_accepted_and_expected_tokens() -> None:
    model, actual = BranchModel(3), np.array([0.1, 0.25, 1.0, 0.4])
    assert model.shape(15) == TreeShape(15, 3, (1.0, 1.0, 1.0), 1.0)
    for _ in range(400):
        shape = model.shape(15)
        model.observe(shape, outcome(shape, actual))
    shape = model.shape(15)
    # The prior holds them back.
    np.testing.assert_allclose((*shape.factors, shape.fork), [0.3, 0.55, 1.9, 0.8], atol=0.12)


def test_factors_follow_the_text_and_are_forgotten_with_the_drafter() -> None:
    model = BranchModel(2)
    for accepted in (0.0, 1.0):
        for _ in range(400):
            shape = model.shape(15)
            model.observe(shape, outcome(shape, np.full(3, accepted)))
        shape = model.shape(15)
        assert (shape.factors[0] > 1.0) == (shape.fork > 1.0) == (accepted > 0.5)
    model.reset()
    assert model.shape(15) == TreeShape(15, 2, (1.0, 1.0), 1.0)
