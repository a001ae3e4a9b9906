"""Which drafts are verified: the most valuable ones, and a prefix of every request's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.cluster.speculation.draft_trimming import drafts_to_verify, survivals
from manta.cluster.step.scheduler_output import FloatArray, IntArray, Trim


def some_step(seed: int, requests: int, maximum: int) -> tuple[FloatArray, IntArray, Trim]:
    """Drafts with random probabilities, and step seconds that rise in stairs."""
    random = np.random.default_rng(seed)
    num_drafts = random.integers(0, maximum + 1, requests).astype(np.int32)
    margins = random.choice([0.0, 0.5, 3.0, np.inf], (requests, maximum)) * random.lognormal(
        0, 1, (requests, 1)
    )
    margins = np.where(np.arange(maximum) < num_drafts[:, None], margins, np.nan).astype(np.float32)
    stairs = np.ceil(np.arange(requests * (maximum + 1) + 1) / random.integers(1, 9))
    trim = Trim(
        bias_K=random.normal(0, 1, maximum).astype(np.float32),
        slope_K=np.full(maximum, 0.7, np.float32),
        bias_R=random.normal(0, 1, requests).astype(np.float32),
        weights_R=random.choice([0.5, 1, 4], requests).astype(np.float32),
        seconds_N=(random.uniform(0.1, 20) + stairs).astype(np.float32),
    )
    return margins, num_drafts, trim


def rate(verified: IntArray, margins: FloatArray, num_drafts: IntArray, trim: Trim) -> float:
    """Value per second, from the definition."""
    taken = np.arange(margins.shape[1]) < verified[:, None]
    worth = (trim.weights_R[:, None] * survivals(margins, num_drafts, trim) * taken).sum()
    return float((worth + trim.weights_R.sum()) / trim.seconds_N[len(verified) + verified.sum()])


@given(seed=st.integers(0, 2**32), requests=st.integers(1, 3), maximum=st.integers(1, 3))
def test_no_other_trimming_gives_more(seed: int, requests: int, maximum: int):
    margins, num_drafts, trim = some_step(seed, requests, maximum)
    verified = drafts_to_verify(margins, num_drafts, requests, trim)
    assert (verified >= 0).all() and (verified <= num_drafts).all()
    every = np.stack(np.meshgrid(*[np.arange(count + 1) for count in num_drafts]), -1).reshape(-1, requests)
    best = max(rate(one, margins, num_drafts, trim) for one in every)
    assert rate(verified, margins, num_drafts, trim) == pytest.approx(best, rel=1e-5)


@given(seed=st.integers(0, 2**32), requests=st.integers(1, 40), rows=st.integers(1, 200))
def test_a_chosen_number_of_rows_is_filled_and_not_exceeded(seed: int, requests: int, rows: int):
    margins, num_drafts, trim = some_step(seed, requests, 7)
    trim = Trim(trim.bias_K, trim.slope_K, trim.bias_R, trim.weights_R, trim.seconds_N[:0], rows)
    verified = drafts_to_verify(margins, num_drafts, requests, trim)
    assert verified.sum() == min(max(rows - requests, 0), num_drafts.sum()) and (verified <= num_drafts).all()
