"""The drafter over pages and batches equals a dense loop over single requests and other implementations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from manta.cluster.pages.kv_cache_groups import LayerPlace
from manta.cluster.step.scheduler_output import AdmittedRequest, SlotSampling
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.block_weights import Projection
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import load_drafter
from manta.drafter.dflash.model import DFlashDrafter
from manta.drafter.dflash.proposer import DFlashProposer
from manta.drafter.dflash.target_features import EmbeddingCopies
from manta.drafter.step.request_states import RequestStates
from manta.drafter.step.sampling.sampler import sample_rows
from manta.drafter.step.sampling.verification import accept
from support.checkpoints import drafters as checkpoints
from support.checkpoints.drafters import HIDDEN, TARGET_LAYERS, VARIANTS, VOCAB
from support.oracles.drafter_requests import (
    FACTS,
    NUM_PAGES,
    NUM_SLOTS,
    PAGE_SIZE,
    Requests,
    i32,
    load_pair,
    plan_of,
    random_taps,
)
from support.oracles.oracle_dflash import Oracle, decode, gumbel


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_batched_paged_blocks_equal_the_oracle(variant: str, tmp_path: Path):
    pair = load_pair(tmp_path, VARIANTS[variant])
    lengths, drafts = [1, 40, 5, 17, 33], [15, 3, 7, 0, 1]
    taps = random_taps(lengths)
    requests = Requests(pair.ours, lengths, taps)
    for ours, context, anchor, k in zip(
        requests.block_logits(drafts), taps, requests.anchors, drafts, strict=True
    ):
        if k:
            expected = pair.oracle.logits(context, anchor, k)
            kept = expected.isfinite()
            assert torch.equal(kept, ours.isfinite())
            assert torch.allclose(ours[kept], expected[kept], atol=3e-5)


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


def test_a_longer_causal_block_begins_with_the_shorter_one(tmp_path: Path):
    pair = load_pair(tmp_path, VARIANTS["z-lab causal everywhere"])
    requests = Requests(pair.ours, [20], random_taps([20]))
    assert torch.allclose(
        requests.block_logits([15])[0][:4], requests.block_logits([4])[0], rtol=0, atol=1e-5
    )


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


def tiny_target():
    """A random transformers target of 6 layers that fits the checkpoints here."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        **{k: v for k, v in checkpoints.BACKBONE.items() if k not in ("model_type", "rope_theta")}
        | {"num_hidden_layers": TARGET_LAYERS, "initializer_range": 0.1, "tie_word_embeddings": False}
    )
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def run_batch(target, oracle: Oracle, drafter: DFlashDrafter, prompts, params, num_tokens, block):
    """Run a minimal engine: Manta's states, drafts, sampling and context over transformers' target."""
    states = RequestStates(NUM_SLOTS, FACTS.max_model_len, (NUM_PAGES,), PAGE_SIZE, "cpu")
    proposer = DFlashProposer(drafter, drafter.new_cache(NUM_PAGES, PAGE_SIZE))
    slots = [5, 0, 3][: len(prompts)]
    order = iter(np.random.default_rng(2).permutation(NUM_PAGES).tolist())
    count = -(-FACTS.max_model_len // PAGE_SIZE)
    pages = [(s, i, next(order)) for s in slots for i in range(count)]
    admitted = [
        AdmittedRequest(s, str(s), i32(p), params[i])
        for i, (s, p) in enumerate(zip(slots, prompts, strict=True))
    ]
    tokens = [list(p) for p in prompts]
    records: list[list[tuple[int, list[int], int]]] = [[] for _ in prompts]
    plan = plan_of(
        slots, [0] * len(slots), map(len, prompts), [0] * len(slots), admitted=admitted, pages=pages
    )
    while True:
        states.apply(plan)
        drafts = proposer.propose(plan, states).drafts_RK
        states.write_drafts(plan, drafts)
        rows = states.lay_out_rows(plan)
        taps, logits = _target_rows(target, oracle, plan, rows.token_ids_N, tokens)
        sampled = sample_rows(logits[rows.sampled_X], rows.sampling)
        out, num = accept(sampled, rows.counts_R, drafts)
        proposer.inject(taps, rows, num)
        states.advance(plan, out, num)
        running = []
        for at, slot in enumerate(plan.slots.tolist()):
            r, k = slots.index(slot), int(plan.num_drafts[at])
            new = out[at, : num[at]].tolist()
            if plan.num_computed[at] > 0:
                records[r].append((len(tokens[r]) - 1, drafts[at, :k].tolist(), len(new) - 1))
            tokens[r] += new
            if len(tokens[r]) < len(prompts[r]) + num_tokens:
                running.append(r)
        if not running:
            return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], records
        left = [len(prompts[r]) + num_tokens - len(tokens[r]) - 1 for r in running]
        k = [min(block - 1, n) for n in left]
        plan = plan_of(
            [slots[r] for r in running], [len(tokens[r]) - 1 for r in running], [x + 1 for x in k], k
        )


def _target_rows(target, oracle: Oracle, plan, token_ids_N, tokens):
    taps, logits, start = [], [], 0
    known = dict(zip([5, 0, 3], tokens, strict=False))
    for slot, first, count in zip(plan.slots, plan.num_computed, plan.num_rows, strict=True):
        ids = known[int(slot)][:first] + token_ids_N[start : start + count].tolist()
        out = target(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        states = [out.hidden_states[i][0][first:] for i in oracle.tap_indices()]
        taps.append(torch.stack(states, dim=1))
        logits.append(out.logits[0][first:])
        start += int(count)
    return torch.cat(taps), torch.cat(logits)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("variant", ["z-lab full attention", "speculators own vocabulary"])
def test_whole_generations_propose_and_accept_as_the_oracle(variant: str, temperature: float, tmp_path: Path):
    """Requests run together; every step has the same drafts, acceptance and tokens."""
    config, target = VARIANTS[variant], tiny_target()
    tensors = checkpoints.drafter_tensors(config)
    checkpoints.write_drafter(tmp_path, config, tensors)
    embedding, head = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    oracle = Oracle(config, tensors, embedding, head)
    drafter = load_drafter(tmp_path, FACTS, EmbeddingCopies(embedding, Linear(head)), torch.float32, "cpu")
    prompts = [[3, 14, 15, 92, 65], [35, 89, 79, 32, 38, 46, 26, 43, 38, 32], [7]]
    seeds = [11, -(2**40) - 3, 2**62 + 17]
    params = [SlotSampling(temperature, 0, 1.0, 0.0, s, 0, ()) for s in seeds]
    num_tokens = 24 if temperature else 10  # greedy, a step returns little more than one
    ours, records = run_batch(target, oracle, drafter, prompts, params, num_tokens, 8)
    accepted = 0
    for r, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):

        def choose(logits, position, seed=seed):
            noise = temperature * gumbel(seed, position, VOCAB) if temperature else 0
            return int((logits.double() + noise).argmax())

        tokens, steps = decode(target, oracle, prompt, num_tokens, 8, choose)
        assert ours[r] == tokens
        assert records[r] == [(s.position, s.drafts, s.accepted) for s in steps]
        accepted += sum(s.accepted for s in steps)
    if temperature:
        assert accepted > 10, "noise shared by target and drafter should let drafts stand"


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
