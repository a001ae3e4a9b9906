"""Kernels of a step: rows, proposals and verification against the host's definitions; sampling against fp64.

Also attention with sinks. Imports Triton. `StatePair` calls the kernels as `actors/targets/runners/` do.

Legend: N rows, R requests, K most drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....cluster.step.dummy_steps import dummy_step
from ....cluster.step.scheduler_output import SlotSampling
from ....drafter.step.gpu_triton.inputs.row_layout import (
    NUM_LISTS,
    DeviceStepRequests,
    lay_out_block,
    lay_out_rows,
    pack,
    write_drafts,
)
from ....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRows as DeviceRows
from ....drafter.step.gpu_triton.inputs.transfers import Upload
from ....drafter.step.gpu_triton.request_states import DeviceStates
from ....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace, sample_rows
from ....drafter.step.gpu_triton.sampling.sampling_metadata import DeviceSamplingMetadata
from ....drafter.step.gpu_triton.verification import accept_and_advance
from ....drafter.step.inputs.gumbel_noise import noise_bits, noise_keys
from ....drafter.step.inputs.row_layout import StepRows, by_request
from ....drafter.step.request_states import RequestStates
from ....drafter.step.sampling.verification import accept
from .checks import REMEDY, Case, Check, CheckOutcome, checks_of_served, error_of, none_differ
from .operators import attend
from .subject import MachineKind

_PAGE, _LENGTH, _MASK = 16, 96, 4000
_PROMPTS, _DRAFTS = (37, 5, 60), (5, 0, 15)
_PADDING = 2  # requests without rows after the others, and as many rows, as in captured steps
_WORDS = 3  # number of distinct tokens; few, so that drafts are accepted
_GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 0, 0, ())
SAMPLINGS = {
    "greedy": _GREEDY,
    "temperature 1": replace(_GREEDY, temperature=1.0),
    "Qwen3's": replace(_GREEDY, temperature=0.6, top_k=20, top_p=0.95),
    "top-p": replace(_GREEDY, temperature=1.0, top_p=0.9),
    "min-p": replace(_GREEDY, temperature=0.8, min_p=0.05),
}
_NEAR = 2e-5  # of scores and filter thresholds: the noise differs in the last places of fp32


def step_checks(machine: MachineKind, *, quick: bool) -> Iterator[Check]:
    yield Check("steps", "rows and proposals", partial(_rows, machine), REMEDY)
    yield Check("steps", "verdicts", partial(_verification, machine), REMEDY)
    dtypes = (torch.float32,) if quick or machine.interpreted else (torch.float32, torch.bfloat16)
    for name, sampling in SAMPLINGS.items():
        for dtype in dtypes:
            look = partial(_tokens, machine, sampling, dtype)
            line = f"tokens, {name}, {str(dtype).removeprefix('torch.')}"
            yield Check("steps", line, look, REMEDY)
    attend_with_sinks = partial(attend, requests=machine.requests["blocks"], has_sinks=True)
    sinks = Case("attention with sinks", partial(error_of, compute=attend_with_sinks), 8, 128)
    yield from checks_of_served("steps", machine, [sinks], quick=quick)


class DraftBlocks(NamedTuple):
    """The blocks of the same requests in the host's and the device's layout.

    `drafting_N` are the device's rows that the host also has: those of requests that draft.
    """

    host: StepRows
    device: DeviceRows
    cu_rows_R1: Tensor
    drafting_N: Tensor

    @property
    def draft_rows(self) -> Tensor:
        """Return the device's rows that sample drafts."""
        return self.drafting_N[self.host.sampled_X]


class Comparison(NamedTuple):
    """Numbers of integers."""

    differing: int
    compared: int


class StatePair:
    """The same requests in the host's states and in the device's states.

    Args:
        sampling: of each request, or of all.
        drafts: of each request.
    """

    def __init__(
        self,
        machine: MachineKind,
        sampling: SlotSampling | Sequence[SlotSampling] = _GREEDY,
        drafts: Sequence[int] = _DRAFTS,
    ) -> None:
        """Apply two plans to both sides: one that admits the requests, and `step`, in which they decode."""
        self._device = machine.device
        rng = np.random.default_rng(0)
        requests = len(drafts)
        samplings = [sampling] * requests if isinstance(sampling, SlotSampling) else sampling
        prompts = [_PROMPTS[i % len(_PROMPTS)] for i in range(requests)]
        pages = -(-_LENGTH // _PAGE)
        num_pages = requests * pages
        size = (requests, _LENGTH, (num_pages,), _PAGE, machine.device)
        self.host, self.device = RequestStates(*size), DeviceStates(*size)
        admission = dummy_step(
            [0] * requests,
            prompts,
            [0] * requests,
            prompts=[rng.integers(0, _WORDS, length, dtype=np.int32) for length in prompts],
            num_pages=[pages] * requests,
            page_order=rng.permutation(num_pages).astype(np.int32),
        )
        admitted = (
            replace(request, sampling=replace(each, seed=seed))
            for seed, (request, each) in enumerate(zip(admission.admitted, samplings, strict=True), -1)
        )
        admission = replace(admission, admitted=tuple(admitted))
        self.step = dummy_step([n - 1 for n in prompts], [k + 1 for k in drafts], drafts)
        room = DeviceStepRequests.list_length(requests + _PADDING)
        upload = Upload(self.device.arena, NUM_LISTS * room, self.device.max_changes)
        for plan in (admission, self.step):
            self.host.apply(plan)
            lists_LW = pack(plan.slots, plan.num_rows, plan.num_drafts, plan.samples, room)
            upload.send(lists_LW.ravel(), self.device.changes(plan))
        self.requests = DeviceStepRequests.decoding(
            upload.values.view(NUM_LISTS, room),
            requests + _PADDING,
            width=1 + max(drafts),
            num_rows=self.step.num_batched_tokens + _PADDING,
        )

    def words(self, count: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng(count).integers(0, _WORDS, count)).to(self._device)

    def blocks(self, *, mask_id: int = _MASK, samples_anchor: bool = False) -> DraftBlocks:
        """Lay out blocks. With `samples_anchor` the anchor's row samples the first draft.

        Then a block has one row less, and the device's rows get the positions of what they sample, as the
        host's have.
        """
        plan = self.step
        requests = self.requests.sampling_anchors() if samples_anchor else self.requests
        block = lay_out_block(requests, self.device.tables, mask_id)
        host = self.host.lay_out_block(plan, mask_id, samples_anchor=samples_anchor)
        assert host is not None, "some request drafts"
        block_rows_R = plan.num_rows - 1 if samples_anchor else plan.num_rows
        drafting_N = np.flatnonzero(np.repeat(plan.num_drafts > 0, block_rows_R))
        block = block.at_next_positions() if samples_anchor else block
        return DraftBlocks(host, block, requests.cu_rows_R1, torch.from_numpy(drafting_N).to(self._device))

    def draft(self) -> tuple[Comparison, Tensor]:
        """Lay out and compare blocks, and place proposals; return these drafts [R, K], too."""
        blocks = self.blocks()
        chosen_N = self.words(len(blocks.device.slots_N))
        write_drafts(chosen_N, blocks.device, self.device.tables)
        host = blocks.host
        drafts_RK = by_request(chosen_N[blocks.draft_rows], host.counts_R, host.max_count)
        self.host.write_drafts(self.step, drafts_RK)
        return self._compare(blocks.device, blocks.drafting_N, host), drafts_RK

    def rows(self) -> Comparison:
        """Lay out the target's rows and compare them."""
        found = lay_out_rows(self.requests, self.device.tables)
        everything_N = torch.arange(self.step.num_batched_tokens, device=self._device)
        return self._compare(found, everything_N, self.host.lay_out_rows(self.step))

    def _compare(self, found: DeviceRows, theirs_N: Tensor, expected: StepRows) -> Comparison:
        """Compare the rows that the host also has; padding must write its K and V to the scratch slot."""
        padding_slots = found.kv_slots[0][-_PADDING:]
        pairs = [
            (found.positions_N[theirs_N], expected.positions_N),
            (found.token_ids_N[theirs_N], expected.token_ids_N),
            (found.kv_slots[0][theirs_N], expected.kv_slots[0]),
            (padding_slots, self.device.tables.skip_slots.expand_as(padding_slots)),
        ]
        return _count(pairs)


def _count(pairs: list[tuple[Tensor, Tensor]]) -> Comparison:
    return Comparison(sum(int((a != b).sum()) for a, b in pairs), sum(a.numel() for a, _ in pairs))


def _rows(machine: MachineKind) -> CheckOutcome:
    pair = StatePair(machine)
    of_blocks, _ = pair.draft()
    of_rows = pair.rows()
    differing = of_blocks.differing + of_rows.differing
    return none_differ(differing, of_blocks.compared + of_rows.compared, "integers")


def _verification(machine: MachineKind) -> CheckOutcome:
    pair = StatePair(machine)
    _, drafts_RK = pair.draft()
    plan, tables, requests = pair.step, pair.device.tables, pair.requests
    chosen_N = pair.words(requests.num_rows)
    counts_R = torch.from_numpy(1 + plan.num_drafts).to(chosen_N)
    expected_RW, expected_R = accept(chosen_N[: plan.num_batched_tokens], counts_R, drafts_RK)
    pair.host.advance(plan, expected_RW, expected_R)
    outcome_RW1 = torch.full((len(requests.slots_R), requests.max_drafts + 2), 99).to(requests.slots_R)
    accept_and_advance(chosen_N, requests, tables, outcome_RW1)
    real, found_RW, found_R = plan.num_requests, outcome_RW1[:, :-1], outcome_RW1[:, -1]
    ends_R = torch.from_numpy(plan.num_computed).to(chosen_N) + expected_R
    pairs = [
        (found_RW[:real], expected_RW),
        (found_R[:real], expected_R),
        (found_RW[real:], torch.full_like(found_RW[real:], -1)),
        (found_R[real:], torch.zeros_like(found_R[real:])),
        (tables.token_ids[:, :_LENGTH], pair.host.token_ids[:, :_LENGTH]),
        (tables.num_computed, ends_R),
    ]
    return none_differ(*_count(pairs), "integers")


def _tokens(machine: MachineKind, sampling: SlotSampling, dtype: torch.dtype) -> CheckOutcome:
    """Check that filters keep the right tokens and each row's token has the best score, up to `_NEAR`."""
    num_rows = 6 if machine.interpreted else 32
    random = torch.Generator(machine.device).manual_seed(0)
    logits_NV = torch.randn(num_rows, machine.vocab_size, generator=random, device=machine.device)
    logits_NV = logits_NV.mul_(3).to(dtype)
    seeds_N, positions_N = np.arange(num_rows) * 10**12, np.arange(num_rows) * 7 + 1
    ids_N, floor_N, _ = choose(logits_NV, sampling, seeds_N, positions_N, with_margins=False)
    z_NV = logits_NV.double()
    scores_NV = exact_scores(logits_NV, sampling, seeds_N, positions_N)
    kept_NV = torch.ones_like(z_NV, dtype=torch.bool)
    if floor_N is not None:
        temperature_N = torch.full_like(floor_N, sampling.temperature)
        kept_NV = logits_NV.float() / temperature_N[:, None] >= floor_N[:, None]
        scaled_NV = z_NV / sampling.temperature
        sure_NV, possible_NV = (_filtered(scaled_NV, sampling, near) for near in (-_NEAR, _NEAR))
        wrong = int((sure_NV & ~kept_NV | kept_NV & ~possible_NV).sum())
        if wrong:
            return none_differ(wrong, kept_NV.numel(), "tokens kept or cut")
    chosen_N1 = ids_N[:, None]
    if not bool(kept_NV.gather(1, chosen_N1).all()):
        return CheckOutcome("a filtered token was chosen", "none", passed=False)
    best_N1 = scores_NV.masked_fill(~kept_NV, -torch.inf).amax(-1, keepdim=True)
    short = float((best_N1 - scores_NV.gather(1, chosen_N1)).clamp_(min=0).max())
    return CheckOutcome(f"{short:.1e} below the best score", f"{_NEAR:.0e}", short <= _NEAR)


def exact_scores(
    logits_NV: Tensor, sampling: SlotSampling, seeds_N: np.ndarray, positions_N: np.ndarray
) -> Tensor:
    """Return the tokens' scores in fp64: logits z, or z + T g with Gumbel noise g."""
    z_NV = logits_NV.double()
    if sampling.temperature <= 0:
        return z_NV
    return z_NV - sampling.temperature * _negative_gumbel(seeds_N, positions_N, z_NV)


def choose(
    logits_NV: Tensor,
    sampling: SlotSampling,
    seeds_N: np.ndarray,
    positions_N: np.ndarray,
    *,
    with_margins: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sample row i in slot i; return ids int64 [N], the filters' floors, and margins fp32 [N] or None."""
    (num_rows, vocab_size), device = logits_NV.shape, logits_NV.device
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    workspace = SamplingWorkspace.build(num_rows, vocab_size, device)
    margins_N = torch.zeros(num_rows, device=device)

    def of_each(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    ids_N, _ = sample_rows(
        logits_NV,
        torch.arange(num_rows, dtype=torch.int32, device=device),
        torch.from_numpy(positions_N).to(device),
        DeviceSamplingMetadata(
            temperature=of_each(sampling.temperature, torch.float32),
            top_k=of_each(sampling.top_k, torch.int32),
            top_p=of_each(sampling.top_p, torch.float32),
            min_p=of_each(sampling.min_p, torch.float32),
            seed=torch.from_numpy(seeds_N).to(device),
            min_length=of_each(0, torch.int32),
            stop_ids=of_each(-1, torch.int32)[:, None],
        ),
        filters=filters,
        workspace=workspace,
        margins_N=margins_N if with_margins else None,
    )
    return ids_N, workspace.filters.floor_N if filters else None, margins_N


def _negative_gumbel(seeds_N: np.ndarray, positions_N: np.ndarray, like_NV: Tensor) -> Tensor:
    """Return the negated noise of `drafter/step/inputs/gumbel_noise.py` from the same integers, in fp64."""
    keys_2N1 = torch.from_numpy(noise_keys(seeds_N, positions_N))[:, :, None].to(like_NV.device)
    u_NV = (noise_bits(keys_2N1, like_NV.shape[1]).double() + 0.5) / 2**32
    return (-torch.log1p(-u_NV)).log()


def _filtered(scaled_NV: Tensor, sampling: SlotSampling, near: float) -> Tensor:
    """Return the tokens that min-p, top-k and top-p keep, with thresholds relaxed by `near`."""
    max_N1 = scaled_NV.amax(-1, keepdim=True)
    kept_NV = torch.ones_like(scaled_NV, dtype=torch.bool)
    if sampling.min_p > 0:
        kept_NV &= scaled_NV >= max_N1 + np.log(sampling.min_p) - near
    if sampling.top_k > 0:
        kept_NV &= scaled_NV >= scaled_NV.topk(sampling.top_k).values[:, -1:] - near
    if sampling.top_p < 1:
        probs_NV = scaled_NV.masked_fill(~kept_NV, -torch.inf).softmax(-1)
        sorted_NV = probs_NV.sort(-1, descending=True).values
        inside_NV = sorted_NV.cumsum(-1) - sorted_NV < sampling.top_p + near
        min_N1 = sorted_NV.masked_fill(~inside_NV, 2.0).amin(-1, keepdim=True)
        kept_NV &= probs_NV >= min_N1 * (1 - near)
    return kept_NV | (scaled_NV == max_N1)
