"""MoE routing in one launch; Triton version of `eager/moe_routing.choose`, after the projection to logits.

A program routes one row, so its choice depends on no other; PyTorch takes a dozen launches per layer. Ties go
to the lower expert id.

Legend: N rows, E experts, k chosen per row, H hidden, G groups; in the kernel K = k rounded up to a power of
two, and E likewise.
"""

# Type checkers know neither Triton's launch options nor what a jitted function returns.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layers.moe import MoeRouter
from ..common.element_ops import dependent_launch, wait_for_predecessor

_NO_DIVISION_BY_ZERO = tl.constexpr(1e-20)  # added to the sum of sigmoids


def choose(
    logits_NE: Tensor,
    rule: MoeRouter,
    correction_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
    owners_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return experts, int32 [N, k], and weights, fp32 [N, k], as `eager/moe_routing.choose`."""
    num_rows, num_experts = logits_NE.shape
    assert num_experts == rule.num_experts and logits_NE.stride(1) == 1, "a logit for each expert"
    ids_Nk = logits_NE.new_empty((num_rows, rule.top_k), dtype=torch.int32)
    weights_Nk = logits_NE.new_empty((num_rows, rule.top_k), dtype=torch.float32)
    if num_rows == 0:
        return ids_Nk, weights_Nk
    _choose[(num_rows,)](
        logits_NE, correction_E, expert_scale_E, owners_N, ids_Nk, weights_Nk, rule.scale,
        logits_NE.stride(0),
        EXPERTS=num_experts, LANES=triton.next_power_of_2(num_experts), CHOSEN=rule.top_k,
        CHOSEN_LANES=triton.next_power_of_2(rule.top_k), SIGMOID=rule.score == "sigmoid",
        CHOOSE_FIRST=rule.choose_first, RENORMALIZE=rule.renormalize, GROUPS=rule.groups,
        TOP_GROUPS=rule.top_groups, num_warps=1, **dependent_launch(logits_NE.device),
    )  # fmt: skip
    return ids_Nk, weights_Nk


@triton.jit
def _choose(
    logits_ptr, correction_ptr, expert_scale_ptr, owners_ptr, ids_ptr, weights_ptr, scale, row_stride,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_LANES: tl.constexpr,
    SIGMOID: tl.constexpr, CHOOSE_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose a row's experts, one after the other, and their weights; a program per row.

    `CHOOSE_FIRST`: by logits, and only the chosen ones' weights are normalized. A correction changes which
    experts are chosen, but not their weights.
    """
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert_E = tl.arange(0, LANES)
    there_E = expert_E < EXPERTS
    logit_E = tl.load(logits_ptr + row * row_stride + expert_E, mask=there_E, other=-float("inf"))
    score_E = logit_E.to(tl.float32)
    if not CHOOSE_FIRST:
        score_E = _scores(score_E, SIGMOID)
    best_E = score_E
    if correction_ptr is not None:
        best_E += tl.load(correction_ptr + expert_E, mask=there_E, other=0.0)
    best_E = tl.where(there_E, best_E, -float("inf"))
    if GROUPS > 1:
        best_E = _in_best_groups(best_E, expert_E, EXPERTS, GROUPS, TOP_GROUPS)
    lane_K = tl.arange(0, CHOSEN_LANES)
    id_K = tl.zeros([CHOSEN_LANES], tl.int32)
    weight_K = tl.full([CHOSEN_LANES], -float("inf") if CHOOSE_FIRST else 0.0, tl.float32)
    for place in range(CHOSEN):
        first = _first_of_highest(best_E, expert_E, EXPERTS)
        id_K = tl.where(lane_K == place, first, id_K)
        weight_K = tl.where(lane_K == place, tl.sum(tl.where(expert_E == first, score_E, 0.0), 0), weight_K)
        best_E = tl.where(expert_E == first, -float("inf"), best_E)
    real_K = lane_K < CHOSEN
    if CHOOSE_FIRST:
        weight_K = tl.where(real_K, _scores(weight_K, SIGMOID), 0.0)
    if RENORMALIZE:
        weight_K /= tl.sum(weight_K, 0) + (_NO_DIVISION_BY_ZERO if SIGMOID else 0.0)
    weight_K *= scale
    if expert_scale_ptr is not None:
        weight_K *= tl.load(expert_scale_ptr + id_K, mask=real_K, other=0.0)
    if owners_ptr is not None:  # padding reads no expert's weights
        id_K = tl.where(tl.load(owners_ptr + row) < 0, -1, id_K)
    tl.store(ids_ptr + row * CHOSEN + lane_K, id_K, mask=real_K)
    tl.store(weights_ptr + row * CHOSEN + lane_K, weight_K, mask=real_K)


@triton.jit
def _scores(logit_E, SIGMOID: tl.constexpr):
    """Return scores of fp32 logits; unused lanes hold -inf."""
    if SIGMOID:
        score_E = 1.0 / (1.0 + tl.exp(-logit_E))
    else:
        part_E = tl.exp(logit_E - tl.max(logit_E, 0))
        score_E = part_E / tl.sum(part_E, 0)
    return score_E


@triton.jit
def _first_of_highest(best_E, expert_E, EXPERTS: tl.constexpr):
    """Return the lowest id with the highest value; the last id if all values are NaN."""
    return tl.min(tl.where(best_E == tl.max(best_E, 0), expert_E, EXPERTS - 1), 0)


@triton.jit
def _in_best_groups(best_E, expert_E, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Set scores to -inf outside the groups with the highest sums of their two best scores."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group_E = expert_E // SIZE
    sum_E = tl.full(best_E.shape, -float("inf"), tl.float32)
    for group in range(GROUPS):
        mine_E = tl.where(group_E == group, best_E, -float("inf"))
        first = _first_of_highest(mine_E, expert_E, EXPERTS)
        rest_E = tl.where(expert_E == first, -float("inf"), mine_E)
        sum_E = tl.where(group_E == group, tl.max(mine_E, 0) + tl.max(rest_E, 0), sum_E)
    kept_E = tl.zeros(best_E.shape, tl.int32)
    for _ in range(TOP_GROUPS):
        group = _first_of_highest(sum_E, expert_E, EXPERTS) // SIZE
        kept_E = tl.where(group_E == group, 1, kept_E)
        sum_E = tl.where(group_E == group, -float("inf"), sum_E)
    return tl.where(kept_E == 1, best_E, -float("inf"))
