"""Draft trimming on the GPU against `trimmed` (device: see `devices.py`)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.speculation.draft_trimming import drafts_to_verify, survivals
from manta.cluster.step.scheduler_output import Trim
from manta.jobs.doctor.cases.drafts import cut
from support.engines.devices import DEVICE
from support.oracles.sampling_cases import WHOLE

pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.sanitized]


def trim_of(rng: np.random.Generator, num_requests: int, maximum: int, num_rows: int) -> Trim:
    """Make probabilities that fall with the position, and requests of different weight, some of zero."""
    return Trim(
        bias_K=np.linspace(0.5, -1.0, maximum).astype(np.float32),
        slope_K=np.linspace(2.0, 0.5, maximum).astype(np.float32),
        bias_R=rng.choice(np.array([0.0, 0.0, -0.7], np.float32), num_requests),
        weights_R=rng.choice(np.array([1.0, 1.0, 2.5, 0.0], np.float32), num_requests),
        seconds_N=np.empty(0, np.float32),
        num_rows=num_rows,
    )


def margins_of(rng: np.random.Generator, drafts_R: np.ndarray, maximum: int) -> np.ndarray:
    """Make few different values, so that there are ties; nan means no draft."""
    margins_RK = rng.choice(np.array([0.0, 0.1, 1.0, 7.5, np.inf], np.float32), (len(drafts_R), maximum))
    return np.where(np.arange(maximum) < drafts_R[:, None], margins_RK, np.float32(np.nan))


@settings(max_examples=25 if WHOLE else 10, deadline=None)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 3), st.integers(0, 2**20))
def test_the_most_valuable_drafts_fill_the_rows(
    num_requests: int, maximum: int, padding: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    drafts_R = rng.integers(0, maximum + 1, num_requests)
    most_rows = num_requests + int(drafts_R.sum())
    num_rows = int(rng.integers(num_requests, most_rows + 3))
    trim, margins_RK = trim_of(rng, num_requests, maximum, num_rows), margins_of(rng, drafts_R, maximum)
    expected_R = drafts_to_verify(margins_RK, drafts_R.astype(np.int32), num_requests, trim)
    found, home = cut(drafts_R, margins_RK, trim, num_rows, DEVICE, padding)
    assert found.num_drafts_R.tolist() == [*expected_R.tolist(), *[0] * padding]
    ends = np.cumsum(1 + expected_R).tolist()
    assert found.cu_rows_R1.tolist() == [0, *ends, *[ends[-1]] * padding]
    assert found.first_chosen_R.tolist() == found.cu_rows_R1.tolist()[:-1]
    assert ends[-1] == min(num_rows, most_rows) and found.num_rows == num_rows
    np.testing.assert_array_equal(home.cpu().numpy()[:num_requests], margins_RK)
    assert home[num_requests:].isnan().all()


def test_without_a_trim_all_drafts_stay() -> None:
    drafts_R = np.array([3, 0, 2])
    margins_RK = margins_of(np.random.default_rng(0), drafts_R, 3)
    found, _ = cut(drafts_R, margins_RK, None, 8, DEVICE, padding=1)
    assert found.num_drafts_R.tolist() == [3, 0, 2, 0] and found.cu_rows_R1.tolist() == [0, 4, 5, 8, 8]


def test_any_number_of_requests_is_trimmed_as_on_the_host() -> None:
    """256 requests have 15 drafts each; near-ties may go either way because rounding differs."""
    rng = np.random.default_rng(1)
    drafts_R, num_rows = np.full(256, 15), 1000
    trim, margins_RK = trim_of(rng, 256, 15, num_rows), rng.exponential(2.0, (256, 15)).astype(np.float32)
    expected_R = drafts_to_verify(margins_RK, drafts_R.astype(np.int32), 256, trim)
    found, _ = cut(drafts_R, margins_RK, trim, num_rows, DEVICE)
    found_R = found.num_drafts_R.cpu().numpy()
    assert found_R.sum() == num_rows - 256
    worth_RK = trim.weights_R[:, None] * survivals(margins_RK, drafts_R.astype(np.int32), trim)

    def taken(count_R: np.ndarray) -> float:
        return float(worth_RK[np.arange(15) < count_R[:, None]].sum())

    assert taken(found_R) == pytest.approx(taken(expected_R), rel=1e-6)
    assert np.abs(found_R - expected_R).sum() <= 4
