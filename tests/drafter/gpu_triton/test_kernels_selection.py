"""DFlash2's kernels against their definition, also over ranks (device: see `devices.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from manta.actors.targets.runners.drafts.tp_sampling import candidates_of_ranks
from manta.drafter.compute.blocks import convolve
from manta.drafter.compute.gpu_triton.delta_net.dynamic_convolution import convolve as convolve_in_kernel
from manta.drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace
from manta.drafter.step.gpu_triton.sampling.selector import Candidates, find_candidates, walk_paths
from manta.drafter.step.sampling.sampler import select_paths
from manta.drafter.step.sampling.selector import SelectorCodebooks
from manta.drafter.step.sampling.selector import candidates as candidates_of
from manta.jobs.doctor.cases.steps import DraftBlocks, StatePair
from manta.jobs.doctor.cases.subject import MachineKind
from support.engines.devices import DEVICE
from support.engines.steps import GREEDY
from support.engines.thread_ranks import OtherRank

pytestmark = pytest.mark.usefixtures("on_the_device")
VOCAB, RANK = 300, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("taps", "hidden", "group"), [(2, 64, 16), (3, 320, 5), (1, 36, 36)])
@pytest.mark.one_in(2)
def test_convolutions_equal_their_definition(taps: int, hidden: int, group: int, dtype: torch.dtype):
    torch.manual_seed(0)
    owners_N = torch.tensor([4] * 5 + [0] + [2] * 3 + [-1] * 2, dtype=torch.int32)
    x_NH, residual_NH = torch.randn(2, len(owners_N), hidden).to(dtype).unbind()
    kernels = torch.randn(len(owners_N), 2, taps, hidden // group).to(dtype)
    base_TH = torch.randn(taps, hidden).to(dtype)
    for side in (0, 1):
        operands = (x_NH, kernels[:, side], base_TH, owners_N)
        for rest in ((), (residual_NH,)):
            expected = convolve(*operands, *rest)
            got = convolve_in_kernel(*operands, *rest)
            assert got.dtype is dtype
            torch.testing.assert_close(
                got, expected, rtol=1e-5 if dtype is torch.float32 else 2e-3, atol=2e-3
            )


def pair_of(name: str, drafts: tuple[int, ...]) -> StatePair:
    """Return requests with settings of a name; some have fewer stop tokens."""
    stops = [(7, 9), (7, 9, 11)]
    samplings = [
        replace(GREEDY, stop_token_ids=stops[r % 2], **{field: values[r] for field, values in given.items()})
        for r in range(len(drafts))
        for given in (SETTINGS[name],)
    ]
    return StatePair(MachineKind.detect(), samplings, drafts)


SETTINGS: dict[str, dict[str, list[Any]]] = {
    "greedy": {},
    "noise": {"temperature": [1.0, 0.0, 2.0, 0.5, 3.0]},
    "early stops": {"min_length": [100] * 5},
    "filters": {
        "temperature": [3.0, 2.0, 0.0, 4.0, 2.0],
        "top_k": [0, 3, 3, 40, 1],
        "top_p": [0.5, 1.0, 0.5, 0.7, 0.2],
        "min_p": [0.0, 0.0, 0.1, 0.1, 0.0],
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("top_k", "samples_anchor"), [(16, False), (5, False), (64, True)])
@pytest.mark.one_in(3)
def test_selector_paths_equal_the_hosts(name: str, dtype: torch.dtype, top_k: int, samples_anchor: bool):
    """Blocks are ragged, one is an anchor alone, and padding follows."""
    counts = (15, 3, 0, 1, 7)
    torch.manual_seed(2)
    pair, distance = pair_of(name, counts), 1 - samples_anchor
    blocks = pair.blocks(mask_id=1, samples_anchor=samples_anchor)
    num_rows = len(blocks.device.token_ids_N)
    # Stop tokens are likely, and some tokens cannot be.
    logits_NV = torch.randn(num_rows, VOCAB) * 2
    logits_NV[:, [7, 9, 11]] += 4
    logits_NV[3, 14:] = -float("inf")
    logits_NV, gates_NE = logits_NV.to(dtype), torch.randn(num_rows, RANK).to(dtype)
    codebooks = SelectorCodebooks(*(torch.randn(2, VOCAB, RANK) * 0.4).to(dtype).unbind(), top_k)
    mine_X = blocks.draft_rows
    expected = select_paths(logits_NV[mine_X], gates_NE[mine_X], blocks.host, codebooks)
    device, state = blocks.device, pair.device.sampling
    found = found_in(pair, blocks, logits_NV, top_k, filters=name == "filters")
    margins_N = torch.full((num_rows,), 99.0)
    chosen_N = walk_paths(
        found,
        gates_NE,
        device,
        blocks.cu_rows_R1,
        state,
        codebooks,
        filters=name == "filters",
        margins_N=margins_N,
        anchor_distance=distance,
    )
    assert expected.margins_RK is not None
    begin, before_N = 0, device.tokens_before(chosen_N, distance)
    for r, count in enumerate(counts):
        mine = slice(begin + distance, begin + distance + count)
        if count:
            anchor = int(device.token_ids_N[begin])
            assert before_N[mine].tolist() == [anchor, *expected.drafts_RK[r, : count - 1].tolist()]
        assert chosen_N[mine].tolist() == expected.drafts_RK[r, :count].tolist()
        torch.testing.assert_close(margins_N[mine], expected.margins_RK[r, :count], rtol=1e-4, atol=1e-4)
        begin += count + distance
    assert not chosen_N[begin:].any()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("vocab_size", "top_k"), [(VOCAB, 16), (4096, 3), (9000, 16)])
@pytest.mark.one_in(3)
def test_candidates_equal_the_hosts(name: str, dtype: torch.dtype, vocab_size: int, top_k: int):
    """Rows have gaps between them, over one chunk and over several."""
    torch.manual_seed(5)
    pair = pair_of(name, (3, 0, 2, 1))
    blocks = pair.blocks(mask_id=1)
    logits_NV = (torch.randn(len(blocks.device.token_ids_N), vocab_size + 8) * 2).to(dtype)[:, :vocab_size]
    logits_NV[:, [7, 9, 11]] += 4
    logits_NV[1, 20] = float("nan")
    mine_X, sampling = blocks.draft_rows, blocks.host.sampling
    expected_XV = logits_NV[mine_X].nan_to_num(-float("inf"))
    if sampling.forbidden_F is not None:
        expected_XV[sampling.forbidden_F[0], sampling.forbidden_F[1]] = -float("inf")
    z_XK, ids_XK = candidates_of(expected_XV, sampling, top_k)
    found = found_in(pair, blocks, logits_NV, top_k, filters=name == "filters")
    got = found.ids_NK[mine_X]
    if dtype is torch.float32:  # else some logits are equal
        assert got.tolist() == ids_XK.tolist()
    assert torch.equal(found.z_NK[mine_X].sort().values, z_XK.sort().values)
    assert torch.equal(found.z_NK[mine_X], expected_XV.gather(1, got).float())


def found_in(
    pair: StatePair, blocks: DraftBlocks, logits_NU: torch.Tensor, top_k: int, **how: Any
) -> Candidates:
    workspace = SamplingWorkspace.build(*logits_NU.shape, DEVICE)
    where = logits_NU.clone(), blocks.device, pair.device.sampling, top_k
    return find_candidates(*where, workspace=workspace, **how)


@pytest.mark.parametrize("name", ["early stops", "noise", "equals"])
def test_ranks_find_the_candidates_of_the_whole_vocabulary(name: str):
    """Each token has the noise of its id; ties go as on one rank."""
    torch.manual_seed(4)
    pair = pair_of("greedy" if name == "equals" else name, (3, 2, 2))
    blocks = pair.blocks(mask_id=1)
    logits_NV = torch.randn(len(blocks.device.token_ids_N), VOCAB) * 2
    logits_NV[:, [7, 9, 11]] += 4
    if name == "equals":
        logits_NV = logits_NV.round()
    expected = found_in(pair, blocks, logits_NV, 16, filters=False)
    half = VOCAB // 2
    mine, theirs = (
        found_in(pair, blocks, logits_NV[:, a:b], 16, filters=False, vocab_start=a)
        for a, b in ((0, half), (half, VOCAB))
    )
    packed = (theirs.scores_NK.view(torch.int32), theirs.z_NK.view(torch.int32), theirs.ids_NK.int())
    got = candidates_of_ranks(mine, 16, OtherRank(torch.stack(packed).unsqueeze(0)))
    for field in ("scores_NK", "z_NK", "ids_NK"):
        assert torch.equal(getattr(got, field), getattr(expected, field)), field
    plain_NK = logits_NV.topk(16).indices.sort().values
    assert not torch.equal(expected.ids_NK, plain_NK), "noise, stops or equals make a difference"
