"""`quantization`: eight-bit weights, and the tokens of the quantized target (device: see `devices.py`)."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from manta.drafter.compute.gpu_triton.linear.fp8_linear import QuantisedWeight
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_target
from support.engines.device_engines import CASES, opened
from support.oracles.quantized_checkpoints import DEQUANTIZED, FORMATS, publish
from support.oracles.sampling_cases import KNOBS, WHOLE, tokens_of

PARAMS = [replace(KNOBS["greedy"], max_tokens=3)] * len(CASES)


def rounded(saved: Path, folder: Path) -> Path:
    """Return the checkpoint with the dequantized values of its quantized weights."""
    folder.mkdir()
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    tensors = load_file(saved / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            weight = QuantisedWeight.of(tensor[None, None])
            tensors[name] = (weight.codes_PLRK[0, 0].float() * weight.scale_O[:, None]).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("target_s", "drafter_s"), [("fp8", None), (None, "fp8")])
def test_tokens_are_the_quantized_targets_and_a_drafters_weights_change_none(
    target_s: str | None,
    drafter_s: str | None,
    tiny_qwen3: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.Size] = []
    of = QuantisedWeight.of

    def counted(weight_PLRK: torch.Tensor) -> QuantisedWeight:
        made.append(weight_PLRK.shape)
        return of(weight_PLRK)

    plain = rounded(tiny_qwen3, tmp_path / "rounded") if target_s else tiny_qwen3
    with opened(plain, None, "torch") as llm:
        expected = tokens_of(llm, CASES, PARAMS)
    monkeypatch.setattr(QuantisedWeight, "of", counted)
    drafts = {"num_speculative_tokens": 3, "adaptive": False}
    spec = {"model": str(tiny_drafter), "quantization": drafter_s, **drafts}
    with (
        caplog.at_level(logging.WARNING),
        opened(tiny_qwen3, None, "triton", quantization=target_s, speculative_config=spec) as llm,
    ):
        assert tokens_of(llm, CASES, PARAMS) == expected
        assert llm.stats().num_drafts > 0
    assert ("The target is quantized (fp8)" in caplog.text) == (target_s is not None)
    (quantised,) = (
        folder for requested, folder in ((target_s, tiny_qwen3), (drafter_s, tiny_drafter)) if requested
    )
    layers = json.loads((quantised / "config.json").read_text())["num_hidden_layers"]
    beside = 0 if target_s else 2  # a drafter's fc and its context's keys and values
    assert len(made) == 4 * layers + beside, "one model's q, k and v, o, gate and up, down; no head"


CELLS = [(name, kept) for name in FORMATS for kept in ("auto", "fp8")]


@pytest.mark.parametrize(("name", "kept"), CELLS if WHOLE else [("ct_w4a16", "fp8")])
def test_published_codes_stay_packed_where_they_can_and_speculation_changes_no_token(
    name: str,
    kept: str,
    tiny_qwen3: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reference is plain decoding by PyTorch's operators with the format's numbers; K/V in e4m3, too."""
    (target, plain), (drafter, _) = (
        publish(saved, tmp_path / saved.name, name) for saved in (tiny_qwen3, tiny_drafter)
    )
    with opened(plain, None, "torch", kv_cache_dtype=kept) as llm:
        expected = tokens_of(llm, CASES, PARAMS)
    with caplog.at_level(logging.INFO), opened(target, drafter, "triton", kv_cache_dtype=kept) as llm:
        assert tokens_of(llm, CASES, PARAMS) == expected
        assert llm.stats().num_drafts > 0
    assert ("packed weights of the target" in caplog.text) == (name not in DEQUANTIZED)


# Kimi's latents beside INT4 experts, and other forms of experts.
KIMI = {"first_k_dense_replace": 1, "q_lora_rank": 32, "v_head_dim": 16}
EXPERTS = [("modelopt_nvfp4", "qwen3_moe"), ("ct_w4a16", "deepseek_v3")]
MORE_EXPERTS = [(name, "qwen3_moe") for name in ("ct_fp8_channel", "ct_w4a16_asymmetric", "ct_w8a16")]


@pytest.mark.parametrize(("name", "family"), [*EXPERTS, *(MORE_EXPERTS if WHOLE else [])])
def test_published_experts_stay_packed_and_change_no_token(
    name: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 64, **(KIMI if family == "deepseek_v3" else {})}
    target, plain = publish(make_tiny_target(tmp_path / "saved", family, seed=5, **sizes), tmp_path, name)
    with opened(plain, None, "torch") as llm:
        expected = tokens_of(llm, CASES, PARAMS)
    with caplog.at_level(logging.INFO), opened(target, None, "triton") as llm:
        assert tokens_of(llm, CASES, PARAMS) == expected
    assert "2 of its 2 products of experts and" in caplog.text


def test_the_largest_weight_of_a_row_takes_the_upper_half_of_e4m3() -> None:
    weight = QuantisedWeight.of(torch.tensor([[448.0, 1.0], [0.0, 0.0], [449.0, -3.0]])[None, None])
    assert weight.scale_O.tolist()[::2] == [1.0, 2.0]
    assert weight.codes_PLRK.float().flatten().tolist() == [448.0, 1.0, 0.0, 0.0, 224.0, -1.5]
