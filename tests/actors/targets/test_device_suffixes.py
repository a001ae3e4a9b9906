"""Copies for a device: short ones, and beside a drafter on two ranks. test_device_runner.py runs them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from manta.actors.targets.model.tensor_parallel import SingleRank
from manta.actors.targets.runners.drafts.device_suffixes import Copies, DeviceSuffixes
from manta.drafter.suffix.mixing import SuffixMixer
from manta.drafter.suffix.proposer import SuffixProposer
from support.engines.steps import Steps
from support.engines.thread_ranks import ThreadRank, ThreadRanks

PROMPT, NUM_ROWS = [7, 8, 9, 10] * 4, 8
TRUSTED, DOUBTED = [4.0, 1.0, 0.0, 0.0], [-9.0, 0.1, 0.0, 0.0]  # instead of `_SUFFIX_PRIOR`


def test_the_rest_of_a_short_copy_is_reported_as_missing() -> None:
    proposer, steps = SuffixProposer(), Steps(2)
    suffixes = DeviceSuffixes(proposer, None, NUM_ROWS, SingleRank(), torch.device("cpu"))
    enter = [steps.admit(slot, prompt) for slot, prompt in enumerate((PROMPT, [3]))]
    prefill = steps.plan([0, 1], [0, 0], [len(PROMPT), 1], admitted=enter)
    suffixes.copy(prefill, np.array([], dtype=np.intp))
    suffixes.append(prefill, np.array([[7], [4]], np.int32), np.array([1, 1], np.int32))
    copies = suffixes.copy(steps.plan([0, 1], [len(PROMPT), 1], [4, 3], [3, 2]), np.array([0, 1]))
    assert copies.tokens_M.tolist() == [8, 9, 10, 0, 0] and copies.slots_M.tolist() == [0, 0, 0, 1, 1]
    assert copies.positions_M.tolist() == [17, 18, 19, 2, 3]
    missing = suffixes.choice.is_missing_RK
    assert missing is not None and missing.tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("first_trusts", [False, True])
def test_ranks_that_would_choose_differently_verify_what_the_first_one_chose(
    first_trusts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_drafts, own_margins = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0.5, 0.4, 0.3])
    ranks = ThreadRanks(2)
    suffixes: list[DeviceSuffixes] = []
    for rank in range(2):
        prior = TRUSTED if (rank == 0) == first_trusts else DOUBTED
        monkeypatch.setattr("manta.drafter.suffix.mixing._SUFFIX_PRIOR", prior)
        proposer = SuffixProposer()
        mixer = SuffixMixer(proposer, 3, 1)
        suffixes.append(
            DeviceSuffixes(proposer, mixer, NUM_ROWS, ThreadRank(ranks, rank), torch.device("cpu"))
        )

    def work(rank: ThreadRank) -> Copies | None:
        mine, steps = suffixes[rank.rank], Steps(1)
        prefill = steps.plan([0], [0], [len(PROMPT)], admitted=[steps.admit(0, PROMPT)])
        assert not len(mine.copy(prefill, np.array([], dtype=np.intp)).slots_M)
        mine.append(prefill, np.array([[7]], np.int32), np.array([1], np.int32))
        plan = steps.plan([0], [len(PROMPT)], [4], [3])
        assert not len(mine.copy(plan, np.array([0])).slots_M), "the drafter has a pass"
        tokens = torch.zeros(1, 64, dtype=torch.int32)
        tokens[0, len(PROMPT) + 1 :][:3] = own_drafts
        return mine.mix(plan, np.array([0]), tokens, torch.tensor([0.0, *own_margins, 0.0]))

    first, second = ranks.run(work)
    assert first is not None and second is not None
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
    assert first.positions_M.tolist() == [17, 18, 19]
    assert first.tokens_M.tolist() == ([8, 9, 10] if first_trusts else own_drafts.tolist())
    assert (first.margins_N[1:4] > 0).all() and not first.margins_N[[0, *range(4, NUM_ROWS)]].any()
