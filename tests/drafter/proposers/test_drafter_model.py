"""The drafter over pages and batches equals a dense loop over single requests and other implementations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manta.cluster.pages.kv_cache_groups import LayerPlace
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.block_weights import Projection
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import load_drafter
from manta.drafter.dflash.target_features import EmbeddingCopies
from support.checkpoints import drafters as checkpoints
from support.checkpoints.drafters import HIDDEN, VARIANTS, VOCAB
from support.oracles.drafter_requests import (
    FACTS,
    Requests,
    assert_blocks_equal,
    load_pair,
    plan_of,
    random_taps,
)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_batched_paged_blocks_equal_the_oracle(variant: str, tmp_path: Path):
    pair = load_pair(tmp_path, VARIANTS[variant])
    assert_blocks_equal(pair, [1, 40, 5, 17, 33], [15, 3, 7, 0, 1])


@pytest.mark.parametrize("variant", ["z-lab full attention", "z-lab biases", "z-lab second"])
def test_bf16_blocks_are_close_to_the_oracle(variant: str, tmp_path: Path):
    pair = load_pair(tmp_path, VARIANTS[variant], torch.bfloat16)
    taps = random_taps([30, 9])
    requests = Requests(pair.ours, [30, 9], taps)
    for ours, context, anchor in zip(requests.block_logits([15, 15]), taps, requests.anchors, strict=True):
        expected = pair.oracle.logits(context, anchor, 15)
        assert (ours.float() - expected).abs().mean() < 0.03 * expected.abs().mean() + 0.02


def test_a_blocks_bits_do_not_depend_on_the_batch(tmp_path: Path):
    if not rows_are_invariant(EagerBackend(), torch.float32, "cpu"):
        pytest.skip("this machine's products are not batch-invariant")
    pair = load_pair(tmp_path, VARIANTS["z-lab sliding layers are causal"])
    lengths = [12, 40, 31]
    requests = Requests(pair.ours, lengths, random_taps(lengths))
    together = requests.block_logits([7, 15, 3])
    for r, k in enumerate([7, 15, 3]):
        alone = [0, 0, 0]
        alone[r] = k
        assert torch.equal(requests.block_logits(alone)[r], together[r])


class Halves(EmbeddingCopies):
    """The embedding and head shards of the second of two ranks."""

    is_split = True

    def local_logits(self, hidden_NH: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.logits(hidden_NH)[:, VOCAB // 2 :], VOCAB // 2


@pytest.mark.parametrize("variant", ["z-lab scales and cap", "speculators own vocabulary"])
def test_a_borrowed_head_is_split_like_the_targets_and_an_own_head_is_whole(variant: str, tmp_path: Path):
    checkpoints.write_drafter(tmp_path, VARIANTS[variant], checkpoints.drafter_tensors(VARIANTS[variant]))
    weight = torch.randn(VOCAB, HIDDEN)
    drafter = load_drafter(tmp_path, FACTS, Halves(weight, Linear(weight)), torch.float32, "cpu")
    assert drafter.is_split == ("own" not in variant)
    if drafter.is_split:
        hidden = torch.randn(3, HIDDEN)
        part, first = drafter.local_logits(hidden)
        assert part.equal(drafter.logits(hidden)[:, first:]) and part.shape == (3, VOCAB - VOCAB // 2)


def test_context_of_steps_without_drafts_is_written_before_the_next_block(tmp_path: Path):
    pair = load_pair(tmp_path, VARIANTS["z-lab full attention"])
    lengths = [30, 41]
    taps = random_taps(lengths)
    at_once, later = Requests(pair.ours, lengths, taps), Requests(pair.ours, lengths, taps)
    later.proposer.cache.kv.copy_(at_once.proposer.cache.kv)
    before = later.proposer.cache.kv.clone()
    later.proposer.propose(later.plan([0, 0]), later.states)
    # Single rows of both requests in turn, then many at once; rows 8 and 9 of the first are written again.
    for position in range(5, 25):
        for slot in (0, 1):
            for requests in (at_once, later):
                requests._write(slot, position, 2 * taps[slot][position : position + 1])
        if position == 9:
            assert torch.equal(later.proposer.cache.kv, before), "nothing is written yet"
    for requests in (at_once, later):
        requests._write(0, 8, 3 * taps[0][8:10])
        requests._write(1, 0, 3 * taps[1])
    plan = at_once.plan([7, 3])
    expected, ours = (requests.proposer.propose(plan, requests.states) for requests in (at_once, later))
    assert ours.drafts_RK.equal(expected.drafts_RK)
    assert torch.allclose(later.proposer.cache.kv, at_once.proposer.cache.kv, rtol=0, atol=1e-5)
    assert not torch.allclose(later.proposer.cache.kv, before, rtol=0, atol=1e-2)


def test_proposals_are_padded_with_minus_one(tmp_path: Path):
    pair = load_pair(tmp_path, VARIANTS["z-lab full attention"])
    requests = Requests(pair.ours, [6, 11, 9], random_taps([6, 11, 9]))
    plan = plan_of([0, 1, 2], [6, 11, 9], [3, 1, 6], [2, 0, 5])
    drafts = requests.proposer.propose(plan, requests.states).drafts_RK
    assert drafts.shape == (3, 5)
    assert (drafts >= 0).sum(1).tolist() == [2, 0, 5]
    expected = requests.block_logits([2, 0, 5])
    assert drafts[0, :2].tolist() == expected[0].argmax(-1).tolist()
    assert drafts[2].tolist() == expected[2].argmax(-1).tolist()
    nobody = plan_of([0], [6], [1], [0])
    assert requests.proposer.propose(nobody, requests.states).drafts_RK.shape == (1, 0)


class KeepsWeights(EagerBackend):
    """PyTorch's operators, recording the weights that they get."""

    def __init__(self) -> None:
        self.matrices: list[torch.Tensor] = []
        self.blocks: list[torch.Tensor] = []

    def linear(self, weight_OH: torch.Tensor, bias_O: torch.Tensor | None = None) -> Projection:
        self.matrices.append(weight_OH)
        return super().linear(weight_OH, bias_O)

    def linear_of_blocks(self, weight_PLRH: torch.Tensor, bias_O: torch.Tensor | None = None) -> Projection:
        self.blocks.append(weight_PLRH)
        return super().linear_of_blocks(weight_PLRH, bias_O)


@pytest.mark.parametrize("groups", [(0, 0, 0), (0, 1, 0)], ids=["one page group", "two"])
def test_context_uses_the_layers_own_key_and_value_weights(groups: tuple[int, ...], tmp_path: Path):
    config, backend = checkpoints.z_lab(num_hidden_layers=3), KeepsWeights()
    tensors = checkpoints.drafter_tensors(config)
    checkpoints.write_drafter(tmp_path, config, tensors)
    shared_embeddings = EmbeddingCopies(torch.zeros(VOCAB, HIDDEN), Linear(torch.zeros(VOCAB, HIDDEN)))
    places = [LayerPlace(group, groups[:i].count(group)) for i, group in enumerate(groups)]
    load_drafter(tmp_path, FACTS, shared_embeddings, torch.float32, "cpu", backend, places)
    stores = {weight.untyped_storage().data_ptr() for weight in backend.matrices}
    assert len(backend.blocks) == len(set(groups))
    for group, blocks in enumerate(backend.blocks):
        assert blocks.untyped_storage().data_ptr() in stores
        layers = [i for i in range(3) if groups[i] == group]
        names = [f"layers.{i}.self_attn.{kind}_proj.weight" for kind in "kv" for i in layers]
        assert torch.equal(blocks.flatten(0, 2), torch.cat([tensors[name].float() for name in names]))


def test_blocks_equal_those_of_a_saved_transformers_assistant(tmp_path: Path):
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    theirs = muse.MuseGlimmerAssistantModel(
        muse.MuseGlimmerAssistantConfig(
            vocab_size=VOCAB,  # the one key that ours needs where the target is not the published one
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=64,  # theirs has one key more than every engine's, which has no effect here
            target_layer_ids=[1, 3, 4],
            block_size=16,
            mask_token_id=90,
            attn_implementation="eager",
        )
    ).eval()
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2))
            if parameter.dim() == 1:
                parameter.add_(1)
    theirs.save_pretrained(tmp_path)
    embedding = torch.randn(VOCAB, HIDDEN)
    shared_embeddings = EmbeddingCopies(embedding, Linear(torch.randn(VOCAB, HIDDEN)))
    ours = load_drafter(tmp_path, FACTS, shared_embeddings, torch.float32, "cpu")
    assert ours.config.layout == "assistant" and not any(kind.causal for kind in ours.config.layers)
    taps = random_taps([21])
    requests = Requests(ours, [21], taps)
    ids = torch.tensor([requests.anchors[0]] + [90] * 15)
    with torch.no_grad():
        hidden = theirs(
            noise_embeds=embedding[ids][None],
            context_hidden_states=taps[0].flatten(1)[None],
            attention_mask=dict.fromkeys(("full_attention", "sliding_attention")),
            position_ids=torch.arange(37)[None],
            use_cache=False,
        ).last_hidden_state
    assert torch.allclose(requests.block_logits([15])[0], shared_embeddings.logits(hidden[0, 1:]), atol=2e-4)
