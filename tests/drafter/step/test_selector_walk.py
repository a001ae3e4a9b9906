"""The compiled walk over candidates equals PyTorch's (defined in test_dflash2.py)."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.drafter.step.cpu_numba.step_ops import LOOPS
from manta.drafter.step.inputs.row_layout import StepRows
from manta.drafter.step.sampling.sampler import select_paths
from manta.drafter.step.sampling.selector import SelectorCodebooks
from manta.drafter.step.sampling.step_ops import DEFINITION
from support.oracles.sampling_rows import batch

VOCAB = 120
KNOBS = {  # temperature, top-k, top-p, min-p
    "greedy": (0.0, 3, 0.5, 0.1),
    "warm": (1.0, 0, 1.0, 0.0),
    "top-k": (2.0, 3, 1.0, 0.0),
    "one": (1.0, 1, 1.0, 0.0),
    "top-p": (1.5, 0, 0.6, 0.0),
    "sure": (1.0, 0, 0.01, 0.0),
    "min-p": (1.0, 0, 1.0, 0.1),
    "all": (3.0, 40, 0.9, 0.05),
}


def block_of(knobs: list[str], counts: list[int], seed: int, *, samples_anchor: bool = False) -> StepRows:
    """Return blocks of the requests that draft, one after the other."""
    owners_X = np.repeat(np.arange(len(counts)), counts)
    of_X = np.array([KNOBS[knobs[r]] for r in owners_X]).reshape(-1, 4)
    rows = [tuple(range(count if samples_anchor else count + 1)) for count in counts if count]
    places_N = np.array([place for row in rows for place in row])
    sampled_X = np.arange(len(places_N)) if samples_anchor else np.flatnonzero(places_N)
    sampling = batch(
        len(owners_X),
        **dict(zip(("temperature", "top_k", "top_p", "min_p"), of_X.T, strict=True)),
        seed=owners_X * 977 + seed,
        position=20 + sampled_X + samples_anchor,
    )
    tokens_N = np.random.default_rng(seed).integers(0, VOCAB, len(places_N))
    positions_N = torch.arange(len(places_N))
    return StepRows(
        positions_N=positions_N,
        kv_slots=(),
        batches=(),
        token_ids_N=torch.from_numpy(tokens_N),
        sampled_X=torch.from_numpy(sampled_X),
        counts_R=torch.tensor(counts),
        max_count=max(counts),
        sampling=sampling,
        num_rows_R=np.array([len(row) for row in rows]),
        anchor_distance=0 if samples_anchor else 1,
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(KNOBS)), st.integers(0, 7)), min_size=1, max_size=6).filter(
        lambda requests: any(count for _, count in requests)
    ),
    st.sampled_from([2, 5, 16, 64]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_loops_walk_as_in_the_definition(
    requests, top_k: int, dtype: torch.dtype, samples_anchor: bool, seed: int
):
    knobs, counts = (list(x) for x in zip(*requests, strict=True))
    block = block_of(knobs, counts, seed, samples_anchor=samples_anchor)
    random = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    gates_XE = randn(len(block.sampled_X), 24)
    books = SelectorCodebooks(randn(VOCAB, 24) * 0.3, randn(VOCAB, 24) * 0.3, top_k)
    # Logits without equals: which of these are candidates, definitions leave open.
    logits_XV = torch.stack([torch.randperm(VOCAB, generator=random) for _ in gates_XE]) / 16
    both = [
        select_paths(logits_XV.to(dtype), gates_XE, block, books, operators)
        for operators in (DEFINITION, LOOPS)
    ]
    theirs, ours = both
    assert ours.drafts_RK.tolist() == theirs.drafts_RK.tolist()
    torch.testing.assert_close(ours.margins_RK, theirs.margins_RK, rtol=1e-4, atol=1e-4, equal_nan=True)
