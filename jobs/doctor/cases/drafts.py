"""Kernels used only for drafting: margins, trimming, DFlash2's paths; attention with odd head sizes.

Margins are compared with fp64, trimming and paths with the host's definitions on the same device. Imports
Triton.

Legend: N rows, R requests, K most drafts, V vocabulary, E selector's rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....cluster.speculation.draft_trimming import drafts_to_verify
from ....cluster.step.scheduler_output import SlotSampling, Trim
from ....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests, pack
from ....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace
from ....drafter.step.gpu_triton.sampling.selector import find_candidates, walk_paths
from ....drafter.step.gpu_triton.verification import TrimLists, trim_drafts
from ....drafter.step.sampling.sampler import select_paths
from ....drafter.step.sampling.selector import SelectorCodebooks
from ...bench.common.random_weights import PairShape
from .checks import REMEDY, Case, Check, CheckOutcome, none_differ
from .operators import attention_error
from .steps import SAMPLINGS, StatePair, choose, exact_scores
from .subject import BackendCandidate, MachineKind

_HEAD_DIMS = (80, 96, 192)  # not powers of two: tiles are wider than heads
_NEAR = 1e-4  # of margins: fp32 rounding of logits and of the noise of two scores
_RANK, _TOP_K = 256, 16  # as in published selectors


def draft_checks(machine: MachineKind) -> Iterator[Check]:
    for name in ("greedy", "temperature 1", "Qwen3's"):
        yield Check("drafts", f"margins, {name}", partial(_margins, machine, SAMPLINGS[name]), REMEDY)
        yield Check("drafts", f"DFlash2's paths, {name}", partial(_paths, machine, SAMPLINGS[name]), REMEDY)
    yield Check("drafts", "cuts", partial(_cuts, machine), REMEDY)
    dtype = torch.float32 if machine.interpreted else torch.bfloat16
    attention_of_blocks = partial(attention_error, requests=machine.requests["blocks"])
    for head_dim in _HEAD_DIMS:
        shape = PairShape.of("odd heads", {**machine.shape.target_json, "head_dim": head_dim})
        case = Case(f"attention, heads of {head_dim}", attention_of_blocks, 8, 128)
        candidate = BackendCandidate("triton", "triton", (dtype,))
        yield case.check("drafts", replace(machine, shape=shape), candidate, dtype)


def _margins(machine: MachineKind, sampling: SlotSampling) -> CheckOutcome:
    """Check the margin of the best score over the next kept one (the best logit if only one is kept)."""
    num_rows = 6 if machine.interpreted else 32
    random = torch.Generator(machine.device).manual_seed(1)
    logits_NV = torch.randn(num_rows, machine.vocab_size, generator=random, device=machine.device).mul_(3)
    seeds_N, positions_N = np.arange(num_rows) * 10**12, np.arange(num_rows) * 7 + 1
    logits_NV[0, 7] += 40.0  # a row of which filters keep one token
    _, floor_N, margins_N = choose(logits_NV, sampling, seeds_N, positions_N, with_margins=True)
    scores_NV = exact_scores(logits_NV, sampling, seeds_N, positions_N)
    if floor_N is not None:
        kept_NV = logits_NV / sampling.temperature >= floor_N[:, None]
        alone_N1 = kept_NV.sum(-1, keepdim=True) == 1
        kept_scores_NV = scores_NV.masked_fill(~kept_NV, -torch.inf)
        scores_NV = torch.where(alone_N1, logits_NV.double(), kept_scores_NV)
    best_N2 = scores_NV.topk(2).values
    off = float((margins_N - (best_N2[:, 0] - best_N2[:, 1])).abs().max())
    return CheckOutcome(f"off by {off:.1e}", f"{_NEAR:.0e}", off <= _NEAR)


def _cuts(machine: MachineKind) -> CheckOutcome:
    """Check that the kernel keeps the same drafts as the host. Few distinct margins give ties."""
    rng = np.random.default_rng(2)
    count, maximum = (9, 7) if machine.interpreted else (256, 15)
    drafts_R = rng.integers(0, maximum + 1, count).astype(np.int32)
    margins_RK = rng.choice(np.array([0.1, 1.0, 7.5], np.float32), (count, maximum))
    made_RK = np.arange(maximum) < drafts_R[:, None]
    num_rows = count + int(drafts_R.sum()) // 2
    flat_K, ones_R = np.full(maximum, 0.5, np.float32), np.ones(count, np.float32)
    trim = Trim(flat_K, flat_K, 0 * ones_R, ones_R, np.empty(0, np.float32), num_rows)
    expected_R = drafts_to_verify(np.where(made_RK, margins_RK, np.float32(np.nan)), drafts_R, count, trim)
    found, _ = cut(drafts_R, margins_RK, trim, num_rows, machine.device)
    found_R = found.num_drafts_R.cpu().numpy()
    if found_R.sum() != expected_R.sum():
        return CheckOutcome(f"{found_R.sum()} drafts stay", f"{expected_R.sum()}", passed=False)
    return none_differ(int((found_R != expected_R).sum()), count, "requests")


def cut(
    drafts_R: np.ndarray,
    margins_RK: np.ndarray,
    trim: Trim | None,
    num_rows: int,
    device: torch.device,
    padding: int = 0,
) -> tuple[DeviceStepRequests, Tensor]:
    """Run the trimming kernel with a budget of rows; return its requests and the margins."""
    count, maximum = margins_RK.shape
    room, requests_R = DeviceStepRequests.list_length(count + padding), np.arange(count, dtype=np.int32)
    lists = pack(requests_R, 1 + drafts_R, drafts_R, np.ones(count, bool), room)
    values = TrimLists.pack(trim, requests_R.astype(np.intp), room, maximum)
    blocks = [np.insert(of_one[:n], 0, 99.0) for of_one, n in zip(margins_RK, drafts_R, strict=True)]
    margins = np.concatenate([*blocks, np.full(5, 99.0)]).astype(np.float32)
    lists_LW, values_V, margins_N = (torch.from_numpy(x).to(device) for x in (lists, values, margins))
    drafted = DeviceStepRequests.decoding(lists_LW, count + padding, maximum + 1, num_rows)
    home_RK = torch.full((count + padding, maximum), 5.0, device=device)
    num_drafts_R = torch.full((count + padding,), 77, dtype=torch.int32, device=device)
    found = trim_drafts(
        drafted, margins_N, TrimLists.views_of(values_V, room, maximum), num_rows, num_drafts_R, home_RK
    )
    return found, home_RK


def _paths(machine: MachineKind, sampling: SlotSampling) -> CheckOutcome:
    """Check DFlash2's paths for ragged blocks followed by padding."""
    pair, filters = StatePair(machine, sampling), sampling.top_k > 0
    host, block, cu_rows_R1, _ = blocks = pair.blocks(mask_id=0)
    random = torch.Generator(machine.device).manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=machine.device)

    num_rows = len(block.slots_N)
    logits_NV, gates_NE = randn(num_rows, machine.vocab_size), randn(num_rows, _RANK)
    predecessor_VE, successor_VE = (0.1 * randn(machine.vocab_size, _RANK) for _ in range(2))
    codebooks = SelectorCodebooks(predecessor_VE, successor_VE, _TOP_K)
    mine_X = blocks.draft_rows
    theirs = select_paths(logits_NV[mine_X], gates_NE[mine_X], host, codebooks)
    state = pair.device.sampling
    workspace = SamplingWorkspace.build(num_rows, machine.vocab_size, machine.device)
    found = find_candidates(logits_NV, block, state, _TOP_K, filters=filters, workspace=workspace)
    margins_N = torch.zeros(num_rows, device=machine.device)
    chosen_N = walk_paths(
        found, gates_NE, block, cu_rows_R1, state, codebooks, filters=filters, margins_N=margins_N
    )
    assert theirs.margins_RK is not None, "select_paths returns margins"
    of_drafts = theirs.drafts_RK >= 0
    differing = int((chosen_N[mine_X] != theirs.drafts_RK[of_drafts]).sum())
    off = float((margins_N[mine_X] - theirs.margins_RK[of_drafts]).abs().max())
    measured = f"{differing} of {len(mine_X)} drafts differ, margins by {off:.1e}"
    return CheckOutcome(measured, f"0, {_NEAR:.0e}", not differing and off <= _NEAR)
