"""A target's own layer for multi-token prediction: chains equal transformers' block over pages and chunks.

test_eagle3.py tests preemption of chains, test_lossless.py has cells of the grid.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.loading.memory_budget import page_bytes
from manta.actors.targets.loading.rank_loader import load_runner
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError, ConfigError
from manta.cluster.request.request import SamplingParams
from safetensors.torch import load_file, save_file
from support.checkpoints.mtp_targets import BLOCKS, PARTS, block_of, make_mtp_target, names_of
from support.checkpoints.tiny import make_tiny_target, transformers_model
from support.engines.steps import settings
from support.engines.thread_ranks import ThreadRank, ThreadRanks
from support.oracles.recorded_chains import (
    GREEDY,
    WARM,
    Choice,
    assert_chains_equal,
    assert_prefix_hits_keep_chains,
    decode_alone,
    prompt,
    texts,
)
from transformers import PreTrainedModel


@dataclass
class MtpOracle:
    """The one-layer model, the target's embedding and head, and the layer's tensors by part.

    Attributes:
        stored_one: what a norm's weight of 1 is stored as: 0 where files hold w of 1 + w.
    """

    block: PreTrainedModel
    embedding: torch.Tensor
    head: torch.Tensor
    parts: dict[str, torch.Tensor]
    stored_one: float
    eps: float

    def chain(self, states: torch.Tensor, tokens: list[int], num: int, choose) -> tuple[list[int], list]:
        """Drafts after `tokens` (n + 1), given the target's normed states [n, H] of all but the last.

        Args:
            choose: (logits [V], absolute position) -> token.
        """
        assert len(states) == len(tokens) - 1
        ids, drafts, logits = list(tokens[1:]), [], []
        for _ in range(num):
            y = self.last_state(ids, states)
            logits.append((y @ self.head.T)[0])
            drafts.append(choose(logits[-1], len(tokens) + len(drafts)))
            states, ids = torch.cat((states, y)), [*ids, drafts[-1]]
        return drafts, logits

    def last_state(self, ids: list[int], states: torch.Tensor) -> torch.Tensor:
        """The layer's normed output [1, H] of the last row, of tokens and states side by side."""
        pair = self._norm(self.embedding[ids], "embed_norm"), self._norm(states, "hidden_norm")
        x = torch.cat(pair, dim=-1) @ self.parts["combine"].T
        return self.block.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1:]

    def _norm(self, x: torch.Tensor, part: str) -> torch.Tensor:
        weight = self.parts[part] + (1.0 - self.stored_one)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * weight


@dataclass
class LayeredOracle:
    """Several layers, of which layer k makes draft k, as SGLang runs MiMo-V2's.

    All of them get the target's states; each further layer gets the tokens rotated by one more, with the last
    draft at the end.
    """

    layers: list[MtpOracle]

    def chain(self, states: torch.Tensor, tokens: list[int], num: int, choose) -> tuple[list[int], list]:
        assert len(states) == len(tokens) - 1
        ids, drafts, logits = list(tokens[1:]), [], []
        for layer in self.layers[:num]:
            logits.append((layer.last_state(ids, states) @ layer.head.T)[0])
            drafts.append(choose(logits[-1], len(tokens) + len(drafts)))
            ids = [*ids[1:], drafts[-1]]
        return drafts, logits


@torch.no_grad()
def chains(
    target, oracle: MtpOracle | LayeredOracle, tokens: list[int], anchors: list[int], num: int, choose
) -> dict:
    """Drafts and logits of a chain after each of these positions of a sequence, by position."""
    out = target.model(torch.tensor([tokens]), use_cache=False)
    states = out.last_hidden_state[0]
    return {n: oracle.chain(states[:n], tokens[: n + 1], num, choose) for n in anchors}


NUM_DRAFTS = 3


def mtp(target: Path, **changes: object) -> EngineConfig:
    spec = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    return settings(target, **{"speculative_config": spec, "page_size": 8, **changes})


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda family: make_mtp_target(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_target(tmp_path_factory.mktemp("three"), "mimo_v2", num_mtp_layers=3)


def oracle_of(folder: Path, family: str, target, layer: int = 0) -> MtpOracle:
    tensors = load_file(folder / "model.safetensors")
    parts = {part: tensors[name] for part, name in names_of(family, layer)[1].items() if part in PARTS}
    eps = read_model(folder).rms_norm_eps
    stored_one = 0.0 if family.startswith("qwen") else 1.0
    embedding, head = target.get_input_embeddings().weight.data, target.lm_head.weight.data
    block = transformers_model(folder / block_of(layer))
    return MtpOracle(block, embedding, head, parts, stored_one, eps)


@pytest.mark.parametrize(("family", "params"), [(f, (GREEDY, WARM)[i % 2]) for i, f in enumerate(BLOCKS)])
def test_every_position_of_a_chain_equals_transformers_block(
    family: str, params: SamplingParams, target_of
) -> None:
    """Prompts come in chunks and batches, with rejections; no token differs from plain decoding."""
    folder = target_of(family)
    target = transformers_model(folder)
    check_chains(folder, target, oracle_of(folder, family, target), params)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "T=1"])
def test_each_of_several_layers_makes_the_draft_of_its_depth(
    params: SamplingParams, three_layers: Path
) -> None:
    target = transformers_model(three_layers)
    layers = [oracle_of(three_layers, "mimo_v2", target, layer) for layer in range(3)]
    check_chains(three_layers, target, LayeredOracle(layers), params)


def check_chains(folder: Path, target, oracle: MtpOracle | LayeredOracle, params: SamplingParams) -> None:
    def chains_of(tokens: list[int], anchors: list[int], choose: Choice) -> dict:
        return chains(target, oracle, tokens, anchors, NUM_DRAFTS, choose)

    assert_chains_equal(mtp(folder, max_num_batched_tokens=16), params, chains_of)


def test_a_prefix_hit_keeps_the_layers_entries_and_features(target_of, three_layers: Path) -> None:
    """Also next to recurrent states, where the layer stores latents, and with several states for a page."""
    for folder in (target_of("qwen3_5"), target_of("deepseek_v3"), three_layers):
        assert_prefix_hits_keep_chains(mtp(folder))


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo_v2 of three layers"])
def test_two_ranks_shard_the_layer_and_return_the_plain_tokens(
    family: str, target_of, three_layers: Path
) -> None:
    folder = three_layers if "three" in family else target_of(family)
    alone, _ = load_runner(settings(folder, num_pages=80))
    plain = texts(decode_alone(alone, prompt(12), 0))
    config = mtp(folder, tensor_parallel_size=2, page_size=16, num_pages=80)

    def work(rank: ThreadRank) -> list[tuple[list[int], int, list[float]]]:
        return decode_alone(load_runner(config, rank)[0], prompt(12), NUM_DRAFTS)

    first, second = ThreadRanks(2).run(work)
    assert first == second
    assert texts(first)[: len(plain)] == plain


def test_page_sizes_include_the_layers_latents_and_features(target_of) -> None:
    plan = resolve_config(mtp(target_of("deepseek_v3")))
    (with_layer,), (without,) = page_bytes(plan), page_bytes(plan, drafter=False)
    assert with_layer - without == 8 * (32 + 8) * 4 + 64 * 4
    assert plan.num_speculative_tokens == NUM_DRAFTS and plan.tap_ids == (3,)
    config = mtp(target_of("deepseek_v3"))
    spec = replace(config.speculative_config, num_speculative_tokens=None)
    assert resolve_config(replace(config, speculative_config=spec)).num_speculative_tokens == 3


def test_there_are_at_most_as_many_drafts_as_layers(three_layers: Path) -> None:
    plan = resolve_config(mtp(three_layers))
    geometry = plan.drafter.kv_geometry
    with_layers, without = sum(page_bytes(plan)), sum(page_bytes(plan, drafter=False))
    assert with_layers - without == 3 * (8 * geometry.width + 64) * 4
    default = replace(plan.config.speculative_config, num_speculative_tokens=None)
    assert resolve_config(replace(plan.config, speculative_config=default)).num_speculative_tokens == 3
    more = replace(plan.config.speculative_config, num_speculative_tokens=4)
    with pytest.raises(ConfigError, match=r"=4 is more than .*: each of its 3 layers makes one"):
        resolve_config(replace(plan.config, speculative_config=more))


def test_targets_without_the_layer_are_refused_by_name(target_of, tiny_qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='"mtp": Qwen3ForCausalLM has no layer for multi-token'):
        resolve_config(mtp(tiny_qwen3))
    with pytest.raises(ConfigError, match=r"or its config\.json says that it has none"):
        resolve_config(mtp(make_tiny_target(tmp_path / "without", "glm4_moe")))
    with pytest.raises(CheckpointError, match=r"holds no mtp\.fc\.weight: .* published without"):
        resolve_config(mtp(make_tiny_target(tmp_path / "stripped", "qwen3_5")))


def test_a_missing_tensor_of_the_layer_is_named(target_of, tmp_path: Path) -> None:
    folder = make_mtp_target(tmp_path, "glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.4.self_attn.q_norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.4.self_attn.q_norm.weight is missing"):
        resolve_config(mtp(folder))
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
