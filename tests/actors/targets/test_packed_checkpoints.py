"""Compiled products keep the codes of quantized checkpoints, and compute with their values."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.actors.targets.loading.rank_loader import Checkpoints, load_runner, start_runner
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.targets.loading.weight_report import WeightCounts
from manta.actors.targets.model.mlp_weights import DenseTensors, RoutedTensors
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.cluster.errors import ConfigError
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from manta.drafter.compute.checkpoint.quantized_matrix import QuantizedMatrix
from manta.drafter.compute.cpu_fused.backend import FusedCpuBackend
from manta.drafter.compute.cpu_fused.tiles.isa_dispatch import has_tiles
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from manta.drafter.dflash.checkpoint import load_drafter
from manta.drafter.dflash.target_features import TargetFacts
from manta.drafter.eagle3.checkpoint import load_eagle3
from support.checkpoints.drafters import eagle3_speculators, write_drafter
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_drafter, make_tiny_target
from support.engines.steps import Steps, settings
from support.engines.thread_ranks import PROMPTS, tokens_by_steps, tokens_of_ranks
from support.oracles.quantized_checkpoints import DEQUANTIZED, FORMATS, publish
from support.oracles.sampling_cases import WHOLE

pytestmark = pytest.mark.skipif(bf16_instructions() is None, reason="this CPU has no products of bf16")
BF16 = {"dtype": "bfloat16", "num_pages": 80}
# One format of each kind of codes that a product decodes.
DECODED = ("fp8_per_tensor", "ct_w8a16", "ct_w4a16", "gptq", "ct_w4a16_asymmetric", "modelopt_nvfp4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("saved"), "qwen3", head_dim=32)


def tokens(folder: Path, **changes: object) -> list[list[int]]:
    return tokens_by_steps(load_runner(settings(folder, **BF16, **changes))[0], PROMPTS, 8)


def agreement(found: list[list[int]], expected: list[list[int]]) -> float:
    """Return the part of the tokens before the first difference.

    Without AMX, products with codes do not round values to bf16, so nearly equal logits may change places.
    """
    same = [
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(theirs))
        for mine, theirs in zip(found, expected, strict=True)
    ]
    return sum(same) / sum(map(len, expected))


LEAST_AGREEMENT = 1.0 if has_tiles() else 0.5


def matrices(folder: Path) -> dict[str, torch.Tensor | QuantizedMatrix]:
    plan = resolve_config(settings(folder, **BF16))
    assert plan.attention_backend == "compiled"
    layer = Checkpoints().target(plan, Sharding(plan.target, 0, 1)).layer(0)
    assert isinstance(layer.mlp, DenseTensors)
    return {
        "qkv": layer.qkv_OH,
        "o": layer.o_HO,
        "gate_up": layer.mlp.gate_up_IH,
        "down": layer.mlp.down_HI,
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_stay_packed_and_have_the_values_of_the_format(saved: Path, name: str, tmp_path: Path) -> None:
    quantized, plain = publish(saved, tmp_path, name)
    expected = matrices(plain)
    for part, matrix in matrices(quantized).items():
        assert isinstance(matrix, QuantizedMatrix) == (name not in DEQUANTIZED), part
        values = matrix.dequantized(torch.bfloat16) if isinstance(matrix, QuantizedMatrix) else matrix
        right = expected[part]
        assert isinstance(right, torch.Tensor) and torch.equal(values, right), part


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DECODED)
def test_tokens_are_those_of_the_dequantized_target_until_logits_are_nearly_equal(
    saved: Path, name: str, tmp_path: Path
) -> None:
    quantized, plain = publish(saved, tmp_path, name)
    assert agreement(tokens(quantized), tokens(plain)) >= LEAST_AGREEMENT


def drafted(target: Path, drafter: Path, method: str) -> np.ndarray:
    """Margins of the drafts of a step after a prompt."""
    spec = {"model": str(drafter), "method": method, "num_speculative_tokens": 3, "adaptive": False}
    runner = load_runner(settings(target, **BF16, speculative_config=spec))[0]
    steps = Steps(1, num_groups=len(runner.states.page_tables_GSP))  # type: ignore[attr-defined]
    count = len(PROMPTS[0])
    runner.execute(steps.plan([0], [0], [count], admitted=[steps.admit(0, PROMPTS[0])]))  # type: ignore[attr-defined]
    margins = runner.execute(steps.plan([0], [count], [4], [3])).margins  # type: ignore[attr-defined]
    assert margins is not None
    return margins


@pytest.mark.parametrize(
    ("method", "name"), [("dflash", "ct_w4a16"), ("dflash", "modelopt_fp8"), ("eagle3", "gptq")]
)
def test_a_drafter_keeps_its_codes_and_drafts_by_their_numbers(
    method: str, name: str, saved: Path, tmp_path: Path
) -> None:
    if method == "dflash":
        drafter, load = make_tiny_drafter(tmp_path / "saved", head_dim=32), load_drafter
    else:
        config = eagle3_speculators(layer={"head_dim": 32})
        drafter, load = write_drafter(tmp_path / "saved", config), load_eagle3
    folders = publish(drafter, tmp_path, name)
    ours, expected = (drafted(saved, folder, method) for folder in folders)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(ours, expected, atol=0 if has_tiles() else 0.1)
    facts, held = TargetFacts(64, 4, TINY_VOCAB, 64), list[int]()
    for folder in folders:
        backend = FusedCpuBackend(1)
        load(folder, facts, None, torch.bfloat16, "cpu", backend)  # type: ignore[arg-type]
        held.append(backend.weight_bytes or 0)
    assert 0 < held[0] < 0.6 * held[1]


def test_a_load_reports_what_stays_packed_of_each_model(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, _ = publish(saved, tmp_path / "target", "ct_w4a16")
    plain = make_tiny_drafter(tmp_path / "saved", head_dim=32)
    drafter, _ = publish(plain, tmp_path / "drafter", "gptq_act_order")
    spec = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    with caplog.at_level(logging.INFO):
        load_runner(settings(target, **BF16, speculative_config=spec))
    assert "INT4 in groups of 32): 16 of its 16 dense matrices stay packed, others are" in caplog.text
    assert "in groups of 32, act-order): its matrices are dequantized at load" in caplog.text
    assert all(f"packed weights of the {name} take" in caplog.text for name in ("target", "drafter"))
    facts, alone, shared = TargetFacts(64, 4, TINY_VOCAB, 64), FusedCpuBackend(1), FusedCpuBackend(1)
    load_drafter(drafter, facts, None, torch.bfloat16, "cpu", alone)  # type: ignore[arg-type]
    load_drafter(plain, facts, None, torch.bfloat16, "cpu", shared)  # type: ignore[arg-type]
    before = WeightCounts.of(shared)
    load_drafter(drafter, facts, None, torch.bfloat16, "cpu", shared)  # type: ignore[arg-type]
    assert WeightCounts.of(shared, before) == WeightCounts.of(alone) and before.packed_bytes > 0


@pytest.mark.parametrize("name", DECODED if WHOLE else ("ct_w4a16", "modelopt_nvfp4"))
def test_experts_stay_packed_and_give_the_tokens_of_dequantized_ones(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Between compiled loops, in bf16, by the same kind of products."""
    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "head_dim": 32}
    quantized, _ = publish(make_tiny_target(tmp_path / "saved", "qwen3_moe", **sizes), tmp_path, name)
    plan = resolve_config(settings(quantized, **{**BF16, "dtype": "auto"}))
    assert (plan.attention_backend, plan.dtype) == ("torch", torch.bfloat16)
    expected = tokens_by_steps(start_runner(plan, Checkpoints(dequantizes=True))[0], PROMPTS, 8)
    with caplog.at_level(logging.INFO):
        found = tokens_by_steps(start_runner(plan, Checkpoints())[0], PROMPTS, 8)
    assert agreement(found, expected) >= LEAST_AGREEMENT
    assert "2 of its 2 products of experts and" in caplog.text, "the second layer is dense"
    mlp = Checkpoints().target(plan, Sharding(plan.target, 0, 1)).layer(0).mlp
    assert isinstance(mlp, RoutedTensors) and isinstance(mlp.experts.down, PackedCodes)


def test_ranks_cut_experts_at_groups_or_have_whole_ones(tmp_path: Path) -> None:
    """64 inner states are two groups of 32: by four ranks they do not divide, but eight experts do."""
    saved = make_tiny_target(
        tmp_path / "saved", "qwen3_moe", num_hidden_layers=1, moe_intermediate_size=64, num_key_value_heads=4
    )
    plan = resolve_config(settings(publish(saved, tmp_path, "ct_w4a16_asymmetric")[0], **BF16))

    def down_of(rank: int, ranks: int) -> tuple[torch.Tensor, int]:
        mlp = Checkpoints().target(plan, Sharding(plan.target, rank, ranks)).layer(0).mlp
        assert isinstance(mlp, RoutedTensors) and isinstance(mlp.experts.down, PackedCodes)
        return mlp.experts.down.dequantized(torch.bfloat16), mlp.experts.first_expert

    whole, _ = down_of(0, 1)
    halves = [down_of(rank, 2) for rank in (0, 1)]
    assert torch.cat([half for half, _ in halves], 2).equal(whole) and halves[1][1] == 0
    quarters = [down_of(rank, 4) for rank in range(4)]
    assert torch.cat([quarter for quarter, _ in quarters]).equal(whole) and quarters[3][1] == 6


@pytest.mark.parametrize("name", ["ct_w4a16", "awq"])
def test_ranks_cut_codes_at_groups(name: str, tmp_path: Path) -> None:
    saved = make_tiny_target(tmp_path / "saved", "qwen3", num_hidden_layers=1, head_dim=32)
    quantized, _ = publish(saved, tmp_path, name)
    plan = resolve_config(settings(quantized, **BF16, tensor_parallel_size=2))
    whole = Checkpoints().target(plan, Sharding(plan.target, 0, 1)).layer(0)
    assert isinstance(whole.o_HO, QuantizedMatrix)
    parts = [Checkpoints().target(plan, Sharding(plan.target, rank, 2)).layer(0).o_HO for rank in (0, 1)]
    assert all(isinstance(part, QuantizedMatrix) for part in parts)
    values = torch.cat([part.dequantized(torch.bfloat16) for part in parts], 1)  # type: ignore[union-attr]
    assert values.equal(whole.o_HO.dequantized(torch.bfloat16))


@pytest.mark.parametrize("kind", ["int8", "int4", *(FORMATS if WHOLE else ["ct_w4a16"])])
def test_two_ranks_with_packed_weights_speculate_without_changing_a_token(
    kind: str, saved: Path, tmp_path: Path
) -> None:
    target, drafter = saved, make_tiny_drafter(tmp_path / "drafter", head_dim=32)
    how: dict[str, object] = {"quantization": kind}
    if kind in FORMATS:
        target, drafter = (
            publish(each, tmp_path / f"quantized_{each.name}", kind)[0] for each in (saved, drafter)
        )
        how = {}

    def generate(with_drafts: bool) -> list[list[int]]:
        config = settings(target, drafter if with_drafts else None, **BF16, tensor_parallel_size=2, **how)
        return [found[:8] for found in tokens_of_ranks(config, 8)]

    assert generate(True) == generate(False)


@pytest.mark.parametrize(("kind", "is_doubted"), [("int8", False), ("int4", True)])
def test_a_start_says_what_few_bits_at_load_cost(
    kind: str, is_doubted: bool, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_runner(settings(saved, **BF16, quantization=kind))
    assert f"The target is quantized ({kind}): outputs differ" in caplog.text
    assert ("perplexity may rise by a tenth" in caplog.text) == is_doubted


def test_quantizing_what_is_quantized_is_refused(saved: Path, tmp_path: Path) -> None:
    quantized, _ = publish(saved, tmp_path, "ct_w4a16")
    with pytest.raises(ConfigError, match=r"='int8': .* quantized already .*Leave it out") as caught:
        resolve_config(settings(quantized, **BF16, quantization="int8"))
    assert caught.value.param == "quantization"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, r"is computed in bfloat16 alone\. Set dtype to auto"),
        ({"dtype": "float32", "tensor_parallel_size": 2}, "is computed in bfloat16 alone"),
    ],
)
def test_weights_of_integers_are_refused_where_they_cannot_be_computed(
    changes: dict[str, object], reason: str, saved: Path
) -> None:
    with pytest.raises(ConfigError, match=f"quantization='int4' {reason}") as caught:
        resolve_config(settings(saved, quantization="int4", **changes))
    assert caught.value.param == "quantization"
    changed = settings(saved, quantization="int4", **{**changes, "dtype": "auto"})
    assert resolve_config(changed).dtype is torch.bfloat16
