"""The target's forward pass over pages equals transformers': every row, every family, every variant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.tensor_parallel import SingleRank
from manta.drafter.compute.cpu_fused.backend import FusedCpuBackend
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from manta.drafter.compute.layers.linear import RMSNorm
from support.checkpoints.families import FAMILIES
from support.checkpoints.tiny import TINY_VOCAB, make_tiny_target, transformers_model
from support.oracles.decoder_requests import MAX_LEN, TAPS, computed, load, oracle, weights_of

VARIANTS: dict[str, tuple[str, dict]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen3 with attention biases": ("qwen3", {"attention_bias": True}),
    "qwen3 with an untied head": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3 with sliding windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "qwen2 with sliding windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2 with a tied head": ("qwen2", {"tie_word_embeddings": True}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "llama without rope scaling": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    "llama with a kv head per head": ("llama", {"num_key_value_heads": 4}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "gemma3 with attention biases": ("gemma3", {"attention_bias": True}),
    "gemma4 without experts": ("gemma4", {"enable_moe_block": False}),
    "gemma4 whose full layers have values of their own": (
        "gemma4",
        {"attention_k_eq_v": False, "num_global_key_value_heads": None, "enable_moe_block": False},
    ),
    "gemma4 with attention biases": ("gemma4", {"attention_bias": True, "enable_moe_block": False}),
    "deepseek_v3 whose rotated pairs are halves apart": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3 without yarn": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gemma3 with three layers that slide to one": ("gemma3", {"sliding_window_pattern": 4}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = VARIANTS[request.param]
    return make_tiny_target(tmp_path_factory.mktemp("variant"), family, seed=11, **changes)


def test_logits_of_every_row_equal_transformers_in_chunks_and_batches(checkpoint: Path) -> None:
    requests = computed(load(checkpoint))
    for tokens, logits in zip(requests.tokens, requests.logits, strict=True):
        expected, _ = oracle(checkpoint, tokens)
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(bf16_instructions() is None, reason="this CPU has no products of bf16")
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_the_compiled_pass_is_as_near_to_fp32_as_transformers_in_bf16(family: str, tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path, family, seed=11, hidden_size=64, head_dim=32)
    backend = FusedCpuBackend(2)
    model = Decoder(weights_of(folder, torch.bfloat16), TAPS, MAX_LEN, SingleRank(), backend)
    requests, theirs = (
        computed(model, batch=backend.attention_batch),
        transformers_model(folder, torch.bfloat16),
    )
    errors = [
        torch.stack((torch.cat(logits).float() - exact, theirs(torch.tensor([tokens])).logits[0] - exact))
        for tokens, logits in zip(requests.tokens, requests.logits, strict=True)
        for exact in (oracle(folder, tokens)[0],)
    ]
    ours, reference = torch.cat(errors, dim=1).square().mean((1, 2)).sqrt().tolist()
    assert ours < 1.1 * reference


@pytest.mark.one_in(2)
def test_taps_are_outputs_of_blocks_before_the_final_norm_in_the_given_order(checkpoint: Path) -> None:
    requests = computed(load(checkpoint))
    weights = weights_of(checkpoint)
    final_norm = RMSNorm(weights.final_norm(), weights.spec.rms_norm_eps)
    for tokens, taps in zip(requests.tokens, requests.taps, strict=True):
        _, hidden = oracle(checkpoint, tokens)
        third, first, last = torch.cat(taps).unbind(1)
        torch.testing.assert_close(third, hidden[3], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(first, hidden[1], atol=1e-4, rtol=1e-4)
        # transformers returns the last block's output only after the final norm.
        torch.testing.assert_close(final_norm(last), hidden[4], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(last, hidden[4], atol=1e-2)


def test_bfloat16_is_close_to_transformers(tiny_qwen3: Path) -> None:
    requests = computed(load(tiny_qwen3, torch.bfloat16))
    expected, _ = oracle(tiny_qwen3, requests.tokens[2])
    got = torch.cat(requests.logits[2]).float()
    assert torch.cosine_similarity(got, expected, dim=-1).min() > 0.999


def test_omitted_config_values_take_the_familys_defaults(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path, "llama")
    raw = json.loads((folder / "config.json").read_text())
    for key in ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "mlp_bias"):
        raw.pop(key, None)
    (folder / "config.json").write_text(json.dumps(raw))
    spec = read_model(folder)
    mixer, mlp = spec.layers[0].mixer, spec.layers[0].mlp
    assert (mixer.head_dim, mixer.num_kv_heads, spec.tied_head, mlp.bias) == (16, 4, False, False)


@torch.inference_mode()
def test_a_drafter_borrows_embedding_and_head_as_stored(tmp_path: Path) -> None:
    """The target itself applies norm, scale and cap."""
    folder = make_tiny_target(tmp_path, "muse_glimmer")
    model, weights = load(folder), weights_of(folder)
    spec, ids = weights.spec, torch.arange(TINY_VOCAB)
    assert torch.equal(model.shared_embeddings.embed(ids), weights.embedding())
    hidden = 20 * torch.randn(3, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    raw = hidden @ weights.head().T
    for lent in (model.shared_embeddings.logits(hidden), model.shared_embeddings.local_logits(hidden)[0]):
        torch.testing.assert_close(lent, raw)
    assert spec.logit_cap is not None and raw.abs().max() > 5 * spec.logit_cap
    capped = spec.logit_cap * torch.tanh(spec.logit_multiplier * raw / spec.logit_cap)
    for own in (model.logits(hidden), model.local_logits(hidden)[0]):
        torch.testing.assert_close(own, capped)
