"""Routers against their definition; experts alone and in batches, whole and sharded.

The reference is PyTorch's operators in fp64, which `test_target_decoder.py` compares with transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.block_weights import BlockWeights, DenseMLP, RankSum, RoutedExperts
from manta.drafter.compute.blocks import Mlp
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.moe_routing import choose
from manta.drafter.compute.layers.linear import RMSNorm
from manta.drafter.compute.layers.moe import Experts, ExpertWeights, MoeRouter, RouterWeights
from manta.jobs.doctor.cases.experts import exact_experts
from torch import Tensor

HIDDEN, INNER, EXPERTS, CHOSEN = 72, 20, 8, 3
DTYPES = [torch.float32, torch.bfloat16]


def by_definition(logits_E: Tensor, rule: MoeRouter, correction_E: Tensor) -> dict[int, float]:
    """Return the experts and weights of one row, by Python's own sorting and sums."""
    logits = [float(v) for v in logits_E]
    whole = logits_E.double().softmax(0) if rule.score == "softmax" else logits_E.double().sigmoid()
    scores = logits if rule.choose_first else [float(v) for v in whole]
    ranks = [s + float(c) * rule.correction for s, c in zip(scores, correction_E, strict=True)]
    size = len(ranks) // rule.groups
    groups = [range(g * size, (g + 1) * size) for g in range(rule.groups)]
    if rule.groups > 1:
        groups.sort(key=lambda group: -sum(sorted((ranks[e] for e in group), reverse=True)[:2]))
        groups = groups[: rule.top_groups]
    best = sorted((e for group in groups for e in group), key=lambda e: (-ranks[e], e))[: rule.top_k]
    shares = [scores[e] for e in best]
    if rule.choose_first:
        shares = torch.tensor(shares, dtype=torch.float64).softmax(0).tolist()
    if rule.renormalize:
        shares = [share / sum(shares) for share in shares]
    return {e: share * rule.scale for e, share in zip(best, shares, strict=True)}


RULES: dict[str, dict[str, Any]] = {
    "softmax": {"score": "softmax"},
    "softmax, shares as they are": {"score": "softmax", "renormalize": False},
    "the best first": {"score": "softmax", "choose_first": True, "renormalize": False},
    "sigmoid": {"score": "sigmoid", "correction": True, "scale": 2.5},
    "sigmoid in groups": {
        "score": "sigmoid",
        "correction": True,
        "groups": 4,
        "top_groups": 2,
        "renormalize": False,
    },
}


@pytest.mark.parametrize("name", RULES)
def test_rows_are_routed_by_the_rule(name: str) -> None:
    torch.manual_seed(0)
    rule = MoeRouter(num_experts=EXPERTS, top_k=CHOSEN, **RULES[name])
    logits_NE, correction_E = 2 * torch.randn(60, EXPERTS), torch.randn(EXPERTS)
    ids_Nk, weights_Nk = choose(logits_NE, rule, correction_E if rule.correction else None)
    assert (ids_Nk.dtype, weights_Nk.dtype) == (torch.int32, torch.float32)
    for logits_E, ids, weights in zip(logits_NE, ids_Nk.tolist(), weights_Nk.tolist(), strict=True):
        expected = by_definition(logits_E, rule, correction_E)
        assert ids == list(expected)
        assert weights == pytest.approx(list(expected.values()), rel=1e-5)


def test_ties_go_to_the_expert_with_the_lower_number() -> None:
    logits_NE = torch.zeros(2, 200)
    logits_NE[1, [190, 3, 77]] = 1.0
    rule = MoeRouter(num_experts=200, top_k=4, score="softmax")
    assert choose(logits_NE, rule)[0].tolist() == [[0, 1, 2, 3], [3, 77, 190, 0]]


def test_a_router_may_norm_the_residual_and_weight_its_experts(backend: Backend) -> None:
    torch.manual_seed(0)
    weight_EH, norm_H, scale_E = torch.randn(EXPERTS, HIDDEN), torch.rand(HIDDEN), torch.rand(EXPERTS)
    rule = MoeRouter(
        num_experts=EXPERTS, top_k=CHOSEN, score="softmax", bias=True, normed_input=True, expert_scale=True
    )
    bias_E = torch.randn(EXPERTS)
    route = backend.route(
        RouterWeights(
            rule=rule, weight_EH=weight_EH, bias_E=bias_E, expert_scale_E=scale_E, norm=RMSNorm(norm_H, 1e-2)
        )
    )
    u_NH, x_NH = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN)
    ids_Nk, weights_Nk = route(u_NH, x_NH)
    normed_NH = x_NH * (x_NH.pow(2).mean(-1, keepdim=True) + 1e-2).rsqrt() * norm_H
    logits_NE = normed_NH @ weight_EH.T + bias_E
    for row in range(len(x_NH)):
        expected = by_definition(logits_NE[row], rule, torch.zeros(EXPERTS))
        assert ids_Nk[row].tolist() == list(expected)
        shares = [share * float(scale_E[e]) for e, share in expected.items()]
        assert weights_Nk[row].tolist() == pytest.approx(shares, rel=1e-4)


def test_a_router_in_fp32_stays_in_fp32(backend: Backend) -> None:
    """A sigmoid router needs that: 1 + 2^-10 is 1 in bf16."""
    weight_EH = torch.tensor([[1.0], [1.0 + 2**-10]])
    rule = MoeRouter(num_experts=2, top_k=1, score="sigmoid")
    x_NH = torch.ones(1, 1, dtype=torch.bfloat16)
    for weight, chosen in ((weight_EH, 1), (weight_EH.bfloat16(), 0)):
        assert backend.route(RouterWeights(rule=rule, weight_EH=weight))(x_NH, x_NH)[0].item() == chosen


def random_experts(dtype: torch.dtype, **changes: Any) -> ExpertWeights:
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER) * INNER**-0.5
    return replace(
        ExpertWeights(gate_up=gate_up.to(dtype), down=down.to(dtype)),
        gate_up_bias_EI=torch.randn(EXPERTS, 2 * INNER).to(dtype),
        down_bias_EH=torch.randn(EXPERTS, HIDDEN).to(dtype),
        **changes,
    )


def random_rows(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    ids_NE = torch.rand(num_rows, EXPERTS).argsort(1)
    return torch.randn(num_rows, HIDDEN).to(dtype), ids_NE[:, :CHOSEN].int(), torch.rand(num_rows, CHOSEN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
@pytest.mark.one_in(2)
def test_rows_get_the_weighted_sum_of_their_experts(
    backend: Backend, activation: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    weights = random_experts(dtype, activation=activation, limit=0.7)
    rows = random_rows(21, dtype)
    experts, before = backend.experts(weights), int(backend.expert_reads or 0)
    got = experts(*rows)
    assert int(backend.expert_reads or 0) - before == len(rows[1].unique())
    assert got.dtype is dtype
    error = (got.double() - exact_experts(weights, *rows)).abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 0.05)


def test_a_rank_adds_the_results_of_its_own_experts(backend: Backend) -> None:
    torch.manual_seed(2)
    whole = random_experts(torch.float32)
    parts = [
        replace(
            whole,
            gate_up=whole.gate_up[first : first + 4],
            down=whole.down[first : first + 4],
            gate_up_bias_EI=whole.gate_up_bias_EI[first : first + 4],  # type: ignore[index]
            down_bias_EH=whole.down_bias_EH[first : first + 4],  # type: ignore[index]
            first_expert=first,
        )
        for first in (0, 4)
    ]
    rows = random_rows(17, torch.float32)
    results = [backend.experts(part)(*rows) for part in parts]
    torch.testing.assert_close(results[0] + results[1], backend.experts(whole)(*rows))
    torch.testing.assert_close(results[1].double(), exact_experts(parts[1], *rows), atol=1e-5, rtol=1e-5)
    x_1H, only_first = rows[0][:1], torch.tensor([[0, 1, 2]], dtype=torch.int32)
    assert not backend.experts(parts[1])(x_1H, only_first, rows[2][:1]).any()


def test_a_rows_bits_do_not_depend_on_other_rows(backend: Backend) -> None:
    torch.manual_seed(3)
    experts, rows = backend.experts(random_experts(torch.float32)), random_rows(40, torch.float32)
    together = experts(*rows)
    for size in (1, 3, 16):
        parts = zip(*(tensor.split(size) for tensor in rows), strict=True)
        assert torch.equal(torch.cat([experts(*part) for part in parts]), together)


@pytest.mark.parametrize("gated", [False, True])
def test_the_shared_expert_is_added_before_the_sum_over_ranks(backend: Any, gated: bool) -> None:
    """It is added fully, or times sigmoid(w u); one sum over ranks includes it and the experts."""
    torch.manual_seed(4)
    weights, (x_NH, _, _) = random_experts(torch.float32), random_rows(11, torch.float32)
    router = RouterWeights(
        rule=MoeRouter(num_experts=EXPERTS, top_k=CHOSEN, score="softmax"),
        weight_EH=torch.randn(EXPERTS, HIDDEN),
    )
    gate_up_IH, down_HI = torch.randn(2 * INNER, HIDDEN), torch.randn(HIDDEN, INNER)
    weight_1H, norm = torch.randn(1, HIDDEN), RMSNorm(torch.rand(HIDDEN), 1e-6)
    reduced: list[Tensor] = []

    def all_reduce(part_NH: Tensor) -> Tensor:
        reduced.append(part_NH.clone())
        return part_NH.mul_(2.0)  # as of two ranks

    routed = RoutedExperts(
        route=backend.route(router),
        experts=backend.experts(weights),
        shared=DenseMLP(gate_up=backend.linear(gate_up_IH), down=backend.linear(down_HI)),
        shared_gate=backend.linear(weight_1H) if gated else None,
        rank_sum=RankSum(all_reduce),
    )
    square = backend.linear(torch.eye(HIDDEN))
    block = BlockWeights(attention_norm=norm, qkv=square, o=square, mlp_norm=norm, mlp=routed)
    got_NH, normed_NH = Mlp(backend, block)(norm(x_NH), x_NH, norm)

    u_NH = norm(x_NH)
    gate_NI, up_NI = (u_NH @ gate_up_IH.T).chunk(2, dim=-1)
    share_N1 = torch.sigmoid(u_NH @ weight_1H.T) if gated else 1.0
    shared_NH = (gate_NI * torch.sigmoid(gate_NI) * up_NI) @ down_HI.T * share_N1
    chosen = routed.route(u_NH, x_NH)
    part_NH = exact_experts(weights, u_NH, *chosen).float() + shared_NH
    torch.testing.assert_close(reduced[0], part_NH, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_NH, x_NH + 2 * part_NH, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(normed_NH, norm(got_NH))


class _BatchDependentExperts(NumbaBackend):
    """Experts whose result depends on the number of rows."""

    def experts(self, weights: ExpertWeights) -> Experts:
        made = super().experts(weights)

        def compute(x_NH: Tensor, expert_ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
            return made(x_NH, expert_ids_Nk, weights_Nk) * (1 + 1e-6 * (len(x_NH) == 1))

        return compute


def test_batch_invariance_is_measured_with_experts_if_the_model_has_some() -> None:
    assert rows_are_invariant(NumbaBackend(), torch.float32, "cpu", routed=True)
    assert rows_are_invariant(_BatchDependentExperts(), torch.float32, "cpu")
    assert not rows_are_invariant(_BatchDependentExperts(), torch.float32, "cpu", routed=True)
