"""DFlash2's kernels against their definition, also over ranks (device: see `devices.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from manta.actors.targets.runners.tp_sampling import candidates_of_ranks
from manta.drafter.compute.blocks import convolve
from manta.drafter.compute.gpu_triton.delta_net.dynamic_convolution import convolve as convolve_in_kernel
from manta.drafter.step.gpu_triton.inputs.row_layout import DeviceStepRows as DeviceRows
from manta.drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace
from manta.drafter.step.gpu_triton.sampling.sampling_metadata import DeviceSamplingMetadata
from manta.drafter.step.gpu_triton.sampling.selector import Candidates, find_candidates, walk_paths
from manta.drafter.step.inputs.row_layout import StepRows
from manta.drafter.step.inputs.sampling_metadata import SamplingMetadata
from manta.drafter.step.sampling.sampler import select_paths
from manta.drafter.step.sampling.selector import SelectorCodebooks
from manta.drafter.step.sampling.selector import candidates as candidates_of
from support.engines.devices import DEVICE
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


def test_a_convolution_starts_again_with_each_requests_block():
    torch.manual_seed(1)
    x_NH, dynamic_NTC, base_TH = torch.randn(7, 8), torch.randn(7, 3, 2), torch.randn(3, 8)
    owners_N = torch.tensor([1, 1, 1, 2, 2, 3, 3])
    whole = convolve(x_NH, dynamic_NTC, base_TH, owners_N)
    for begin, end in ((0, 3), (3, 5), (5, 7)):
        alone = convolve(x_NH[begin:end], dynamic_NTC[begin:end], base_TH, owners_N[begin:end])
        assert torch.equal(whole[begin:end], alone)


@dataclass
class Blocks:
    """The same requests' blocks in the host's and the device's layout, which has -1 for padding."""

    host: StepRows
    device: DeviceRows
    cu_rows_R1: torch.Tensor
    state: DeviceSamplingMetadata
    drafting: torch.Tensor  # rows of requests that draft, among the device's

    @classmethod
    def of(cls, counts: list[int], *, samples_anchor: bool = False, **settings: list) -> Blocks:
        """Make blocks; the device's rows have the positions of the tokens that they sample."""
        rng, slots = np.random.default_rng(3), [5, 0, 3, 1, 4][: len(counts)]
        neutral = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_length": 0}
        per = {name: np.array(settings.get(name, [value] * 6)) for name, value in neutral.items()}
        seed, stops = rng.integers(-(2**63), 2**63 - 1, 6), np.array([[7, 9, -1]] * 6)
        stops[:, 2] = np.where(np.arange(6) % 2, 11, -1)
        rows = [
            (s, 20 + 9 * s + k + samples_anchor, k)
            for s, count in zip(slots, counts, strict=True)
            for k in range(count + 1 - samples_anchor)
        ]
        slots_N, positions_N, places_N = (np.array(x) for x in zip(*rows, strict=True))
        tokens_N = np.where(places_N == 0, rng.integers(0, VOCAB, len(rows)), 1)
        num_rows = np.array(counts) + 1 - samples_anchor
        drafting = np.flatnonzero(np.repeat(np.array(counts) > 0, num_rows))
        sampled = np.flatnonzero((places_N[drafting] > 0) | samples_anchor)
        of_X, at_X = slots_N[drafting][sampled], positions_N[drafting][sampled]
        early = [
            (x, t) for x, s in enumerate(of_X) for t in stops[s] if t >= 0 and at_X[x] < per["min_length"][s]
        ]

        def put(values, dtype=torch.int64) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE, dtype)

        sampling = SamplingMetadata.build(
            temperature=per["temperature"][of_X].astype(np.float32),
            top_k=per["top_k"][of_X].astype(np.int64),
            top_p=per["top_p"][of_X].astype(np.float32),
            min_p=per["min_p"][of_X].astype(np.float32),
            seed=seed[of_X],
            position=at_X,
            forbidden_F=torch.tensor(early, device=DEVICE).T if early else None,
            device=DEVICE,
        )
        host = StepRows(
            put(positions_N[drafting]),
            (),
            (),
            put(tokens_N[drafting]),
            put(sampled),
            put(counts),
            max(counts),
            sampling,
            num_rows[np.array(counts) > 0],
            anchor_distance=0 if samples_anchor else 1,
        )
        padding = np.full(3, -1)
        device = DeviceRows(
            put(np.append(positions_N, 0 * padding)),
            (),
            (),
            put(np.append(tokens_N, 0 * padding)),
            put(np.append(slots_N, padding), torch.int32),
        )
        cu_rows = np.append(np.cumsum([0, *num_rows]), [len(rows)] * 2)
        fp32, i32 = torch.float32, torch.int32
        state = DeviceSamplingMetadata(
            put(per["temperature"], fp32),
            put(per["top_k"], i32),
            put(per["top_p"], fp32),
            put(per["min_p"], fp32),
            put(seed),
            put(per["min_length"], i32),
            put(stops, i32),
        )
        return cls(host, device, put(cu_rows, i32), state, put(drafting))


SETTINGS = {
    "greedy": {},
    "noise": {"temperature": [1.0, 0.0, 2.0, 0.5, 1.0, 3.0]},
    "early stops": {"min_length": [100] * 6},
    "filters": {
        "temperature": [3.0, 2.0, 0.0, 4.0, 2.0, 3.0],
        "top_k": [0, 3, 3, 40, 1, 2],
        "top_p": [0.5, 1.0, 0.5, 0.7, 0.2, 1.0],
        "min_p": [0.0, 0.0, 0.1, 0.1, 0.0, 0.2],
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("top_k", "samples_anchor"), [(16, False), (5, False), (64, True)])
@pytest.mark.one_in(3)
def test_selector_paths_equal_the_hosts(name: str, dtype: torch.dtype, top_k: int, samples_anchor: bool):
    """Blocks are ragged, one is an anchor alone, and padding follows."""
    counts = [15, 3, 0, 1, 7]
    torch.manual_seed(2)
    blocks, distance = Blocks.of(counts, samples_anchor=samples_anchor, **SETTINGS[name]), 1 - samples_anchor
    num_rows = len(blocks.device.token_ids_N)
    # Stop tokens are likely, and some tokens cannot be.
    logits_NV = torch.randn(num_rows, VOCAB) * 2
    logits_NV[:, [7, 9, 11]] += 4
    logits_NV[3, 14:] = -float("inf")
    logits_NV, gates_NE = logits_NV.to(dtype), torch.randn(num_rows, RANK).to(dtype)
    codebooks = SelectorCodebooks(*(torch.randn(2, VOCAB, RANK) * 0.4).to(dtype).unbind(), top_k)
    mine_X = blocks.drafting[blocks.host.sampled_X]
    expected = select_paths(logits_NV[mine_X], gates_NE[mine_X], blocks.host, codebooks)
    device, state = blocks.device, blocks.state
    found = found_in(blocks, logits_NV, top_k, filters=name == "filters")
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
    blocks = Blocks.of([3, 0, 2, 1], **SETTINGS[name])
    logits_NV = (torch.randn(len(blocks.device.token_ids_N), vocab_size + 8) * 2).to(dtype)[:, :vocab_size]
    logits_NV[:, [7, 9, 11]] += 4
    logits_NV[1, 20] = float("nan")
    mine_X, sampling = blocks.drafting[blocks.host.sampled_X], blocks.host.sampling
    expected_XV = logits_NV[mine_X].nan_to_num(-float("inf"))
    if sampling.forbidden_F is not None:
        expected_XV[sampling.forbidden_F[0], sampling.forbidden_F[1]] = -float("inf")
    z_XK, ids_XK = candidates_of(expected_XV, sampling, top_k)
    found = found_in(blocks, logits_NV, top_k, filters=name == "filters")
    got = found.ids_NK[mine_X]
    if dtype is torch.float32:  # else some logits are equal
        assert got.tolist() == ids_XK.tolist()
    assert torch.equal(found.z_NK[mine_X].sort().values, z_XK.sort().values)
    assert torch.equal(found.z_NK[mine_X], expected_XV.gather(1, got).float())


def found_in(
    blocks: Blocks, logits_NU: torch.Tensor, top_k: int, *, filters: bool, vocab_start: int = 0
) -> Candidates:
    workspace = SamplingWorkspace.build(*logits_NU.shape, DEVICE)
    where = (blocks.device, blocks.state, top_k)
    return find_candidates(
        logits_NU.clone(), *where, filters=filters, workspace=workspace, vocab_start=vocab_start
    )


@pytest.mark.parametrize("name", ["early stops", "noise", "equals"])
def test_ranks_find_the_candidates_of_the_whole_vocabulary(name: str):
    """Each token has the noise of its id; ties go as on one rank."""
    torch.manual_seed(4)
    blocks = Blocks.of([3, 2, 2], **SETTINGS.get(name, {}))
    logits_NV = torch.randn(len(blocks.device.token_ids_N), VOCAB) * 2
    logits_NV[:, [7, 9, 11]] += 4
    if name == "equals":
        logits_NV = logits_NV.round()
    expected = found_in(blocks, logits_NV, 16, filters=False)
    half = VOCAB // 2
    mine, theirs = (
        found_in(blocks, logits_NV[:, a:b], 16, filters=False, vocab_start=a)
        for a, b in ((0, half), (half, VOCAB))
    )
    packed = (theirs.scores_NK.view(torch.int32), theirs.z_NK.view(torch.int32), theirs.ids_NK.int())
    got = candidates_of_ranks(mine, 16, OtherRank(torch.stack(packed).unsqueeze(0)))
    for field in ("scores_NK", "z_NK", "ids_NK"):
        assert torch.equal(getattr(got, field), getattr(expected, field)), field
    plain_NK = logits_NV.topk(16).indices.sort().values
    assert not torch.equal(expected.ids_NK, plain_NK), "noise, stops or equals make a difference"
