"""The definition of MoE routing, in PyTorch: identical on CPU and GPU, and on every rank.

Ties go to the lower expert id. No host synchronization. Sources: transformers'
modeling_{qwen3_moe,gpt_oss,gemma4,deepseek_v3}.py.

Legend: N rows, E experts, k chosen per row, G groups, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..block_weights import Projection
from ..layers.linear import RMSNorm
from ..layers.moe import MoeRouter, RouterWeights

_NO_DIVISION_BY_ZERO = 1e-20  # added to the sum of sigmoids


def choose(
    logits_NE: Tensor,
    rule: MoeRouter,
    correction_E: Tensor | None = None,
    expert_scale_E: Tensor | None = None,
    owners_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return chosen experts, int32 [N, k], best first, and their weights, fp32 [N, k].

    Experts of rows with a negative owner are -1.
    """
    logits_NE = logits_NE.float()
    scores_NE = logits_NE if rule.choose_first else _scores(logits_NE, rule)
    best_NE = scores_NE if correction_E is None else scores_NE + correction_E
    if rule.groups > 1:
        best_NE = _in_best_groups(best_NE, rule)
    ids_Nk = _highest(best_NE, rule.top_k)
    weights_Nk = scores_NE.gather(1, ids_Nk)
    if rule.choose_first:
        weights_Nk = _scores(weights_Nk, rule)
    if rule.renormalize:
        total_N1 = weights_Nk.sum(dim=-1, keepdim=True)
        weights_Nk = weights_Nk / (total_N1 + _NO_DIVISION_BY_ZERO * (rule.score == "sigmoid"))
    weights_Nk = weights_Nk * rule.scale
    if expert_scale_E is not None:
        weights_Nk = weights_Nk * expert_scale_E[ids_Nk]
    if owners_N is not None:
        ids_Nk = ids_Nk.masked_fill((owners_N < 0).unsqueeze(1), -1)
    return ids_Nk.to(torch.int32), weights_Nk


class LayerRouter:
    """The router of a layer, made of a backend's operators.

    Args:
        project: projection with the router's weight and bias; a row's bits are independent of other rows if
            the backend's products are.
        norm: computes the norm of the raw residual, for rules with `normed_input`.
        choose: as this module's.
    """

    __slots__ = ("_choose", "_norm", "_project", "_weights")

    def __init__(
        self,
        weights: RouterWeights,
        project: Projection,
        norm: Callable[[RMSNorm, Tensor], Tensor] = RMSNorm.__call__,
        choose: Callable[..., tuple[Tensor, Tensor]] = choose,
    ) -> None:
        self._weights, self._project, self._norm, self._choose = weights, project, norm, choose

    def __call__(
        self, normed_NH: Tensor, residual_NH: Tensor, owners_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        weights, norm = self._weights, self._weights.norm
        x_NH = normed_NH if norm is None else self._norm(norm, residual_NH)
        logits_NE = self._project(x_NH.to(weights.weight_EH.dtype))
        return self._choose(logits_NE, weights.rule, weights.correction_E, weights.expert_scale_E, owners_N)


def _scores(logits: Tensor, rule: MoeRouter) -> Tensor:
    return logits.softmax(dim=-1) if rule.score == "softmax" else logits.sigmoid()


def _highest(scores_NE: Tensor, count: int) -> Tensor:
    """Return the indices of the highest scores, descending, ties to the lowest, unlike `topk`."""
    return scores_NE.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(scores_NE: Tensor, rule: MoeRouter) -> Tensor:
    """Set scores to -inf outside the groups with the highest sums of their two best scores."""
    scores_NGE = scores_NE.unflatten(1, (rule.groups, -1))
    two_best_NG2 = scores_NGE.sort(dim=-1, descending=True).values[..., :2]
    groups = _highest(two_best_NG2.sum(dim=-1), rule.top_groups)
    kept_NG = torch.zeros_like(two_best_NG2[..., 0], dtype=torch.bool).scatter_(1, groups, True)
    return scores_NGE.masked_fill(~kept_NG.unsqueeze(-1), float("-inf")).flatten(1)
