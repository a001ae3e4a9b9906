"""Acceptance, against a loop over requests."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.drafter.step.cpu_numba.step_ops import LOOPS
from manta.drafter.step.sampling.step_ops import DEFINITION


def loop(chosen: list[list[int]], drafts: list[list[int]]) -> list[list[int]]:
    out = []
    for x, d in zip(chosen, drafts, strict=True):
        if not x:
            out.append([])
            continue
        stood = 0
        while stood < len(d) and d[stood] == x[stood]:
            stood += 1
        out.append(x[: stood + 1])
    return out


@st.composite
def steps(draw):
    """Draw requests with 0..5 drafts, some without samples; few token ids, so that matches are common."""
    token = st.integers(0, 2)
    chosen, drafts = [], []
    for _ in range(draw(st.integers(1, 6))):
        k = draw(st.integers(0, 5))
        samples = k > 0 or draw(st.booleans())
        drafts.append(draw(st.lists(token, min_size=k, max_size=k)))
        chosen.append(draw(st.lists(token, min_size=k + 1, max_size=k + 1)) if samples else [])
    return chosen, drafts


@settings(max_examples=200, deadline=None)
@given(steps(), st.integers(0, 2))
def test_acceptance_equals_a_loop_over_requests(step, spare: int):
    """By the definition and the compiled loops; drafts may be padded beyond the most of a request."""
    chosen, drafts = step
    width = max(len(d) for d in drafts) + spare
    padded = torch.full((len(drafts), width), -1)
    for r, d in enumerate(drafts):
        padded[r, : len(d)] = torch.tensor(d, dtype=torch.int64)
    flat = torch.tensor([t for x in chosen for t in x], dtype=torch.int64)
    counts = torch.tensor([len(x) for x in chosen])
    for operators in (DEFINITION, LOOPS):
        tokens, num = operators.accept(flat, counts, padded)
        assert tokens.dtype is num.dtype is torch.int64
        assert tokens.shape == (len(drafts), width + 1)
        for r, expected in enumerate(loop(chosen, drafts)):
            assert num[r] == len(expected)
            assert tokens[r].tolist() == expected + [-1] * (width + 1 - len(expected))
