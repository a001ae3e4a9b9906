"""The benchmark's loop on transformers: the oracle's drafts, `generate`'s tokens, kept caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.comparison.contenders import TransformersTarget
from benchmarks.comparison.dflash_loop import LoopDrafter, dflash_loop
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import ConfigError
from safetensors.torch import load_file
from support.checkpoints import drafters as checkpoints
from support.checkpoints.drafters import HIDDEN, TARGET_LAYERS, VARIANTS, VOCAB
from support.oracles.oracle_dflash import Oracle, decode
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

PROMPT = [7, 21, 3, 90, 44, 5, 18]


def target_of(folder: Path) -> PreTrainedModel:
    return TransformersTarget(folder, torch.device("cpu")).load("float32")


def oracle_of(folder: Path, target: PreTrainedModel) -> Oracle:
    head = target.get_output_embeddings()
    assert head is not None
    return Oracle(
        json.loads((folder / "config.json").read_text()),
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()},
        target.get_input_embeddings().weight,
        head.weight,
    )


BEYOND = {
    "assistant": "tensors by transformers' names",
    **{name: "DSpark's heads" for name in VARIANTS if "dspark" in name or "deepspec" in name},
    "speculators second": "convolutions",
    "z-lab convolutions alone": "convolutions",
    "z-lab interleaved pairs": "interleaved rotary pairs",
    "z-lab interleaved pairs, partly rotated": "interleaved rotary pairs",
    "z-lab second": "convolutions",
    "z-lab second, three taps": "convolutions",
    "z-lab sinks and scaled values": "attention sinks",
}


@pytest.mark.parametrize("variant", sorted(BEYOND))
def test_drafters_beyond_the_loops_modules_are_refused(variant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the plain loop has no {BEYOND[variant]}"):
        LoopDrafter(checkpoints.write_drafter(tmp_path, VARIANTS[variant]), embedding_owner())


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - set(BEYOND)))
@torch.no_grad()
def test_drafts_equal_the_oracles_with_context_written_in_parts(variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant]
    target = embedding_owner()
    tensors = checkpoints.drafter_tensors(config)
    replaced = config.get("dflash_config", {}).get("mask_token_id", 0) >= VOCAB
    mask = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2)) if replaced else None
    drafter = LoopDrafter(checkpoints.write_drafter(tmp_path, config, tensors, mask), target)
    oracle = Oracle(config, tensors, target.model.embed_tokens.weight, target.lm_head.weight, mask)
    states = tuple(torch.full((1, 1, 1), float(i)) for i in range(TARGET_LAYERS + 1))
    assert drafter.taps(states).flatten().tolist() == oracle.tap_indices()
    taps = torch.randn(23, 3, HIDDEN, generator=torch.Generator().manual_seed(9))
    cache, begin = DynamicCache(), 0
    for end, anchor, num_drafts in ((14, 5, 15), (15, 77, 15), (23, 31, 6)):
        hidden = drafter.hidden(taps[None, begin:end].flatten(2), anchor, num_drafts, cache)
        found = drafter.logits(hidden)
        expected = oracle.logits(taps[:end], anchor, num_drafts)
        kept = expected.isfinite()
        assert torch.equal(kept, found.isfinite())
        assert torch.allclose(found[kept], expected[kept], atol=3e-5)
        assert cache.get_seq_length() == end, "the block's own K/V are dropped"
        drafts = drafter.drafts(taps[None, :end].flatten(2), anchor, num_drafts, DynamicCache())
        assert drafts == oracle.drafts(taps[:end], anchor, num_drafts, lambda scores, _: int(scores.argmax()))
        begin = end


def embedding_owner() -> Qwen3ForCausalLM:
    torch.manual_seed(4)
    raw = {name: checkpoints.BACKBONE[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    shape = Qwen3Config(
        **raw,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(shape).eval()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_tokens_equal_generates(
    family: str, num_tokens: int, tiny_drafter: Path, request: pytest.FixtureRequest
) -> None:
    target = target_of(request.getfixturevalue(f"tiny_{family}"))
    expected = target.generate(  # type: ignore[operator]
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    answer = dflash_loop(target, LoopDrafter(tiny_drafter, target), PROMPT, num_tokens)
    assert answer.token_ids == expected[0, len(PROMPT) :].tolist()
    assert answer.num_steps + answer.num_accepted == num_tokens - 1


def test_a_trained_drafter_is_accepted_as_often_as_the_oracle_says(shipped_pair: tuple[Path, Path]) -> None:
    target = target_of(shipped_pair[0])
    text, num_tokens = 'def read_lines(path):\n    """Return the lines of a text file."""\n', 24
    prompt = Tokenizer.load(shipped_pair[0]).encode(text)
    tokens, steps = decode(target, oracle_of(shipped_pair[1], target), prompt, num_tokens, block=16)
    answer = dflash_loop(target, LoopDrafter(shipped_pair[1], target), prompt, num_tokens)
    assert answer.token_ids == tokens[:num_tokens]
    assert answer.num_steps == len(steps) < num_tokens - 1
