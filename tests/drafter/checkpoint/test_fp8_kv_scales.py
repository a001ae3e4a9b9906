"""Scales of K and V in a checkpoint: used where both are stored in FP8, and only there.

The grid of `test_lossless.py` and the trees of `test_lossless_trees.py` have cells of such engines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from manta.actors.targets.loading.rank_loader import Checkpoints, load_runner
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.targets.model.mtp import MtpConfig
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.cluster.errors import CheckpointError
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.memory.kv_cache import UNSCALED, KVScales, PagedKVCache
from safetensors.torch import load_file, save_file
from support.checkpoints.drafters import eagle3_speculators, write_drafter
from support.checkpoints.mtp_targets import make_mtp_target
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines.device_engines import generate
from support.engines.steps import settings
from support.oracles.decoder_requests import Requests, load
from support.oracles.fp8_kv_scales import (
    COMPRESSED_TENSORS,
    MODELOPT,
    OUTPUTS,
    SCALES,
    publish_with_kv_scales,
    rounded_oracle,
    with_kv_scales,
)
from support.oracles.quantized_checkpoints import publish

FP8 = {"kv_cache_dtype": "fp8", "attention_backend": "torch", "num_pages": 80}


def scales_of(folder: Path, **changes: object) -> list[KVScales]:
    plan = resolve_config(settings(folder, **{**FP8, **changes}))
    return Checkpoints().target(plan, Sharding(plan.target, 0, 1)).kv_scales()


def doubts_of(folder: Path, **changes: object) -> list[str]:
    """Return what a plan says about K and V."""
    doubts = resolve_config(settings(folder, **{**FP8, **changes})).doubts
    return [doubt for doubt in doubts if "K and V" in doubt]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_logits_equal_transformers_with_keys_and_values_rounded_by_the_scales(
    family: str, tmp_path: Path
) -> None:
    """In chunks, with windows and sinks; other scales, and none, give other logits."""
    scaled, plain = publish_with_kv_scales(make_tiny_target(tmp_path / "saved", family), tmp_path)
    requests = Requests(load(scaled, has_fp8_kv=True), [40], torch.float8_e4m3fn)
    for rows in (25, 1, 14):
        requests.compute({0: rows})
    got, tokens = torch.cat(requests.logits[0]), requests.tokens[0]
    torch.testing.assert_close(got, rounded_oracle(plain, tokens), atol=1e-4, rtol=1e-4)
    for others in ([UNSCALED] * 4, [pair[::-1] for pair in SCALES]):
        assert (got - rounded_oracle(plain, tokens, others)).abs().max() > 0.02


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma3"])
def test_kernels_give_the_definitions_tokens_with_scales(
    family: str, tiny_drafter: Path, tmp_path: Path
) -> None:
    saved = make_tiny_target(tmp_path / "saved", family, seed=5, hidden_size=64)
    target, _ = publish_with_kv_scales(saved, tmp_path)
    expected, _ = generate(target, None, "torch", kv_cache_dtype="fp8")
    got, stats = generate(target, tiny_drafter, "triton", kv_cache_dtype="fp8")
    assert got == expected and stats.num_drafts > 0


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    return publish(make_tiny_target(folder / "saved", "qwen3"), folder, "ct_fp8_channel")[0]


@pytest.mark.parametrize("names", [COMPRESSED_TENSORS, MODELOPT, OUTPUTS, ("kv_scale",)])
def test_scales_are_found_by_every_name(quantized: Path, names: tuple[str, ...], tmp_path: Path) -> None:
    scaled, pairs = with_kv_scales(quantized, tmp_path / "scaled", names), torch.tensor(SCALES).tolist()
    assert scales_of(scaled) == [KVScales(pair[0], pair[len(names) - 1]) for pair in pairs]
    assert scales_of(scaled, kv_cache_dtype="auto") == [UNSCALED] * 4


@pytest.mark.parametrize("form", ["ct_fp8_channel", "modelopt_fp8"])
def test_scales_of_other_forms_are_not_used(form: str, tmp_path: Path) -> None:
    saved = make_tiny_target(tmp_path / "saved", "qwen3", num_hidden_layers=1)
    quantized, _ = publish(saved, tmp_path, form)
    others: list[object] = [{"num_bits": 8, "type": "int"}, {"num_bits": 8, "dynamic": True}]
    for i, declared in enumerate(others if form == "ct_fp8_channel" else [*others, "NVFP4"]):
        scaled = with_kv_scales(quantized, tmp_path / f"{i}", scales=SCALES[:1], declared=declared)
        assert scales_of(scaled) == [UNSCALED]
        (doubt,) = doubts_of(scaled)
        assert "2 stored scales are not used" in doubt
    same = with_kv_scales(quantized, tmp_path / "same", scales=SCALES[:1])
    assert scales_of(same) != [UNSCALED] and not doubts_of(same)


def test_a_plan_says_how_many_scales_are_not_used(quantized: Path, tmp_path: Path) -> None:
    scaled = with_kv_scales(quantized, tmp_path / "kv")
    names, scales = (*COMPRESSED_TENSORS, "q_scale"), [(*pair, 0.5) for pair in SCALES]
    with_queries = with_kv_scales(quantized, tmp_path / "qkv", names, scales=scales)
    said = "K and V are quantized by kv_cache_dtype alone; {} stored scales are not used"
    (doubt,) = doubts_of(scaled, kv_cache_dtype="auto")
    assert said.format(8) in doubt
    assert doubts_of(scaled) == []
    (doubt,) = doubts_of(with_queries)
    assert said.format(4) in doubt


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((0.5,), r"self_attn\.v_scale is missing, although the layer has another scale"),
        (
            (torch.ones(2, 1, 1), torch.ones(2, 1, 1)),
            r"k_scale is stored as F32 of shape \[2, 1, 1\]; K/V in FP8 take one .*kv_cache_dtype to auto",
        ),
        ((torch.tensor(3), torch.tensor(3)), r"k_scale is stored as I64 of shape \[\]"),
    ],
)
def test_scales_that_cannot_be_used_are_refused_before_a_weight_is_read(
    quantized: Path, pair: tuple[float | torch.Tensor, ...], message: str, tmp_path: Path
) -> None:
    scaled = with_kv_scales(quantized, tmp_path / "scaled", scales=[pair] * 4)
    resolve_config(settings(scaled, **{**FP8, "kv_cache_dtype": "auto"}))
    with pytest.raises(CheckpointError, match=message):
        resolve_config(settings(scaled, **FP8))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_no_positive_numbers_are_refused(
    quantized: Path, scale: float, tmp_path: Path
) -> None:
    scaled = with_kv_scales(quantized, tmp_path / "scaled", scales=[(0.5, scale)] * 4)
    with pytest.raises(CheckpointError, match=r"v_scale is .*; a scale .* must be positive and finite"):
        scales_of(scaled)


def test_latents_have_no_scales_and_a_warning_says_so(tmp_path: Path) -> None:
    scaled, _ = publish_with_kv_scales(make_tiny_target(tmp_path / "saved", "deepseek_v3"), tmp_path)
    assert scales_of(scaled) == [UNSCALED] * 4
    (doubt,) = doubts_of(scaled)
    assert "8 stored scales are not used" in doubt


def test_a_layer_for_multi_token_prediction_has_scales_of_its_own(tmp_path: Path) -> None:
    saved = make_mtp_target(tmp_path / "saved", "qwen3_5")
    folder, at = publish(saved, tmp_path, "ct_fp8_channel")[0], "mtp.layers.0.self_attn"
    scales = {f"{at}.k_scale": torch.tensor(0.25), f"{at}.v_scale": torch.tensor(0.0017)}
    save_file({**load_file(folder / "model.safetensors"), **scales}, folder / "model.safetensors")
    spec = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    plan = resolve_config(settings(folder, **FP8, speculative_config=spec))
    assert isinstance(plan.drafter, MtpConfig) and not any("K and V" in doubt for doubt in plan.doubts)
    assert {*scales_of(folder)} == {UNSCALED}
    runner, _ = load_runner(plan.config)
    drafts = runner.drafts._proposer.cache  # type: ignore[attr-defined]
    assert drafts.scales(0) == KVScales(0.25, torch.tensor(0.0017).item())


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_drafters_scales_are_used_and_change_no_token(
    method: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """With PyTorch's operators and with kernels."""
    if method == "dflash":
        saved = make_tiny_drafter(tmp_path / "saved")
    else:
        saved = write_drafter(tmp_path / "saved", eagle3_speculators())
    quantized, _ = publish(saved, tmp_path, "ct_fp8_channel")
    tensors, count = load_file(quantized / "model.safetensors"), 0
    for name in [*tensors]:
        if name.endswith("self_attn.k_proj.weight"):
            at, pair = name.removesuffix(".k_proj.weight"), SCALES[count % 2]
            tensors |= {f"{at}.k_scale": torch.tensor(pair[0]), f"{at}.v_scale": torch.tensor(pair[1])}
            count += 1
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    spec = {"model": str(quantized), "method": method, "num_speculative_tokens": 3, "adaptive": False}
    config = settings(tiny_qwen3, **FP8, speculative_config=spec)
    runner, _ = load_runner(config)
    cache = runner.drafts._proposer.cache  # type: ignore[attr-defined]
    expected = [KVScales(*torch.tensor(SCALES[layer % 2]).tolist()) for layer in range(count)]
    assert [cache.scales(layer) for layer in range(cache.num_layers)] == expected and count
    assert not any("K and V" in doubt for doubt in resolve_config(config).doubts)
    (doubt,) = doubts_of(tiny_qwen3, kv_cache_dtype="auto", speculative_config=spec)
    assert f"{2 * count} stored scales are not used" in doubt
    plain, _ = generate(tiny_qwen3, None, "torch", kv_cache_dtype="fp8")
    for backend in ("torch", "triton"):
        got, stats = generate(tiny_qwen3, None, backend, kv_cache_dtype="fp8", speculative_config=spec)
        assert got == plain and stats.num_drafts > 0


def test_a_view_of_some_layers_divides_by_their_scales() -> None:
    """As the layers of a target that an assistant reads."""
    scales = [KVScales(0.5, 2.0), KVScales(0.25, 0.125)]
    cache = PagedKVCache(2, 2, 4, KVCacheSpec(1, 4, 4), torch.float8_e4m3fn, "cpu", scales=scales)
    view, slots_N = cache.of_layers([1, 0, 1]), torch.tensor([3])
    assert [view.scales(layer) for layer in range(3)] == [scales[1], scales[0], scales[1]]
    view.write(0, slots_N, torch.ones(1, 8))
    assert cache.slots(1)[0, 3].float().tolist() == [4.0] * 4 + [8.0] * 4
