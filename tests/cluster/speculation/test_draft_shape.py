"""A draft shape is written and read by one definition, and says how many drafts a request can use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.config import SpeculativeConfig
from manta.cluster.speculation.draft_length_policy import DraftChoice
from manta.cluster.speculation.draft_shaper import DraftShaper
from manta.cluster.step.draft_shape import UNBRANCHED, DraftShape
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.scheduler_output import StepResult, TreeGain, TreeOutcome, TreeShape

SHAPES = st.just(UNBRANCHED) | st.builds(DraftShape, st.integers(2, 8), st.integers(1, 255))


@given(SHAPES)
def test_what_was_written_is_read_and_accepted_as_settings(shape: DraftShape) -> None:
    assert DraftShape.read({"name": "suite", **shape.settings()}) == shape
    spec = SpeculativeConfig(model="d", **shape.settings())
    assert (spec.tree_width, spec.tree_size) == shape
    assert spec.longest_path(15) == min(15, shape.most_drafts(15))
    assert str(shape.most_drafts(15)) in shape.describe(15) and "15" in shape.describe(15)
    assert shape.describe(15).startswith("trees" if shape.branches else "chains")


def test_a_request_uses_as_many_nodes_as_branches_give_its_tokens_and_as_it_has_slots_for() -> None:
    remaining, room = np.array([0, 3, 9], np.int32), np.array([50, 50, 20], np.int32)
    assert DraftShape(4, 31).limit(remaining, room).tolist() == [0, 12, 20]
    assert UNBRANCHED.limit(remaining, room).tolist() == remaining.tolist()


@pytest.mark.parametrize("changes", [{"is_trial": True}, {"length": 0}, {"is_tree": False}])
def test_trials_plain_steps_and_chosen_chains_are_not_shaped(changes: dict[str, object]) -> None:
    shaper, limits = DraftShaper(DraftShape(4, 31), 15), np.array([31, 31, 20], np.int32)
    choice = DraftChoice(np.array([15, 7, 15], np.int32), 15)
    shaped = shaper.shape(choice, limits)
    assert shaped.num_drafts_R.tolist() == [31, 15, 20] and shaped.shape == TreeShape(15, 4, (1.0,) * 4)
    choice = choice._replace(**changes)
    assert shaper.shape(choice, limits) is choice


def test_chains_are_judged_by_main_paths_and_growing_takes_the_time_that_a_result_has() -> None:
    numbers, none = np.array([3, 4, 5], np.int32), np.zeros(3, np.int32)
    chances = np.zeros(3, np.float32)
    outcome = TreeOutcome(numbers, numbers - 2, none[:, None], chances, chances, none, none)
    plan = dummy_step([8] * 3, [8] * 3, [7] * 3)
    chains = StepResult(plan.step, none[:, None], none)
    trees = replace(chains, trees=outcome, tree_gain=TreeGain(1.0, 0.25))
    shaper, counts = (
        DraftShaper(DraftShape(2, 7), 7),
        (np.array([7, 6], np.int32), np.array([0, 6], np.int32)),
    )
    remaining = np.array([True, False, True])
    drafts, accepted = shaper.main_path(trees, remaining, *counts)
    assert (drafts.tolist(), accepted.tolist()) == ([3, 5], [0, 3])
    assert shaper.main_path(chains, remaining, *counts) == counts
    assert (shaper.grow_s(trees), shaper.grow_s(chains)) == (0.25, 0.0)
