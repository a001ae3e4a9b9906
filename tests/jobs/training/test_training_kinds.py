"""Training of DFlash2 drafters and EAGLE-3 heads: losses fall, and exports draft as trained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.drafter.card import min_card_length
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import check_drafter, load_drafter
from manta.drafter.dflash.config import ConvolutionSize, DraftLayer, SelectorSize
from manta.drafter.dflash.target_features import EmbeddingCopies, TargetFacts
from manta.drafter.eagle3.checkpoint import load_eagle3
from manta.drafter.step.inputs.gumbel_noise import negative_gumbel_of
from manta.jobs.drafters.common.options import TrainOptions
from manta.jobs.drafters.train.train_run import write_drafter_card
from manta.jobs.training.heads.dflash_module import TrainableDrafter
from manta.jobs.training.heads.export import export_drafter
from manta.jobs.training.heads.frozen_target import FrozenTarget
from manta.jobs.training.heads.initialization import continued, drafter_config, facts_of, new_drafter
from manta.jobs.training.heads.offline_proposals import BlockProposals, sampling
from manta.jobs.training.heads.recipes import DrafterSettings, Teaching, TrainSettings
from manta.jobs.training.loop.continuations import ContinuationRequest
from manta.jobs.training.loop.precision import autocast
from manta.jobs.training.loop.training_curves import read_rows
from manta.jobs.training.loop.training_loop import Length, LoopSettings
from manta.jobs.training.train_drafter import Trained, train
from manta.models.recipe.eagle3 import (
    ChainProposals,
    EagleHead,
    EagleSettings,
    eagle_config,
    export_eagle_head,
    make_head,
    new_eagle_head,
)
from safetensors.torch import load_file
from support.checkpoints.drafters import EAGLE3_BLOCK, HIDDEN, TARGET_LAYERS, VOCAB
from support.checkpoints.tiny import make_tiny_target
from support.checkpoints.training_targets import CPU, continuations, small_config, write_target
from support.oracles.drafter_requests import FACTS, Requests, random_taps
from support.oracles.oracle_eagle3 import Eagle3Oracle
from torch.nn import functional as F

MASK_ID, FULL = 63, DraftLayer(causal=False, window=None)
SECOND = DrafterSettings(
    num_layers=2,
    block_sizes=(4, 3),
    num_taps=2,
    num_anchors=6,
    batch_size=4,
    conv_group_size=16,
    selector=SelectorSize(rank=8, top_k=16),
    teaching=Teaching(distance_share=0.5),
)
EAGLE = EagleSettings(depth=3, num_taps=2, batch_size=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def frozen_target(folder: Path, layer_ids: tuple[int, ...] = (1, 3)) -> FrozenTarget:
    return FrozenTarget(folder, layer_ids, max_tokens=64, device=CPU)


def second_drafter(frozen: FrozenTarget) -> TrainableDrafter:
    return new_drafter(drafter_config(frozen.spec, SECOND, MASK_ID), frozen.weights)


def eagle_head(frozen: FrozenTarget) -> EagleHead:
    return new_eagle_head(eagle_config(frozen.spec, EAGLE), frozen.weights)


def shuffle_weights(model: torch.nn.Module) -> None:
    """Set weights with which every part has an effect, rounded to bf16 as in files."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(1.0 + 0.1 * noise)
            elif "codebook" not in name:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(noise * 0.5)
            weight.copy_(weight.bfloat16().float())


@pytest.mark.parametrize("group_size", [None, 16])
def test_an_exported_drafter_drafts_like_the_trained_one(group_size: int | None, tmp_path: Path):
    """Compare logits over pages in fp32, and greedy paths by the selector, with three kinds of layers."""
    kinds = (DraftLayer(False, 20), DraftLayer(False, 20)) if group_size else (DraftLayer(True, 20), FULL)
    config = small_config(
        hidden_size=HIDDEN,
        layers=kinds,
        target_layer_ids=(1, 3, 4),
        block_size=16,
        mask_token_id=90,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        num_target_layers=TARGET_LAYERS,
        convolutions=None if group_size is None else ConvolutionSize(2, group_size),
        selector=SelectorSize(8, 16),
        output_multiplier=0.5,
        logit_softcap=8.0,
    )
    trained = TrainableDrafter(config)
    shuffle_weights(trained)
    target = make_tiny_target(
        tmp_path / "target", "qwen3", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=TARGET_LAYERS
    )
    export_drafter(trained, read_model(target), tmp_path)
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert architecture == ["DFlashDraftModel" if group_size is None else "DFlash2DraftModel"]
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * HIDDEN**-0.5
    served = load_drafter(tmp_path, FACTS, EmbeddingCopies(embedding, Linear(head)), torch.float32, "cpu")
    lengths = [1, 40, 17]
    taps = random_taps(lengths)
    requests = Requests(served, lengths, taps)
    all_ids = torch.arange(VOCAB)

    def scores_of(hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return trained.candidate_selector.scores(hidden, before, all_ids)

    drafts = requests.proposer.propose(requests.plan([15, 15, 15]), requests.states).drafts_RK
    for r, logits in enumerate(requests.block_logits([15, 15, 15])):
        block = torch.full((16,), 90)
        block[0] = requests.anchors[r]
        with torch.no_grad():
            anchors = torch.tensor([[lengths[r]]])
            hidden = trained(taps[r].flatten(1)[None], embedding[block][None, None], anchors)[0, 0, 1:]
            unary = trained.logits(lambda rows: F.linear(rows, head), hidden)
            torch.testing.assert_close(logits, unary, rtol=1e-4, atol=1e-4)
            before, path = block[:1], []
            for slot in range(15):
                scores = unary[slot] + scores_of(hidden[slot : slot + 1], before)[0]
                likeliest = unary[slot].topk(16).indices
                before = likeliest[scores[likeliest].argmax()][None]
                path.append(int(before))
        assert drafts[r].tolist() == path


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.if_changed), 1.0])
def test_an_offline_selector_path_starts_at_each_anchor(temperature: float, target: Path):
    frozen = frozen_target(target)
    drafter = second_drafter(frozen)
    shuffle_weights(drafter)
    drafter.to(frozen.dtype)
    question, tokens = ContinuationRequest((1, 2, 3), temperature, seed=7), torch.arange(3, 15)
    anchors = torch.tensor([4, 9])
    features, _ = frozen.read(tokens[None])
    drafts = BlockProposals(frozen, drafter)(features[0], question, tokens, anchors)
    blocks = torch.full((2, 4), MASK_ID)
    blocks[:, 0] = tokens[anchors]
    with torch.no_grad(), autocast(CPU):
        hidden = drafter(features, frozen.embed(blocks[None]), anchors[None])[0][:, 1:]
        unary = frozen.head(hidden.flatten(0, 1)).float().unflatten(0, (2, 3))
    selector = drafter.candidate_selector.float()
    for row, anchor in enumerate(anchors.tolist()):
        before = tokens[anchor]
        for slot in range(3):
            with torch.no_grad():
                gate = F.linear(hidden[row, slot], selector.hidden_projection.weight.to(hidden.dtype)).float()
                scores = unary[row, slot] + (
                    selector.predecessor_codebook[before] * gate @ selector.successor_codebook.T
                )
            noise = torch.zeros(64)
            if temperature:
                key = sampling(question, torch.tensor([anchor + 1 + slot])).key_2M1
                noise = -negative_gumbel_of(key, torch.arange(64)[None])[0]
            best = (unary[row, slot] + noise).topk(16).indices
            before = best[(scores + noise)[best].argmax()]
            assert drafts[row, slot] == before


def test_offline_chains_do_not_see_tokens_after_their_anchor(target: Path):
    frozen = frozen_target(target)
    head = eagle_head(frozen)
    shuffle_weights(head)
    question, tokens = ContinuationRequest((1, 2), 1.0, seed=7), torch.randint(0, 60, (20,))
    proposals = ChainProposals(frozen, head, num_drafts=3)
    features = frozen.read(tokens[None])[0][0]
    together = proposals(features, question, tokens, torch.tensor([5, 11, 18]))
    assert together.shape == (3, 3)
    for row, anchor in enumerate((5, 11, 18)):
        seen = slice(anchor + 1)
        alone = proposals(features[seen], question, tokens[seen], torch.tensor([anchor]))
        assert torch.equal(alone[0], together[row])


def test_an_untrained_copy_equals_the_first_drafter(target: Path):
    trained = second_drafter(frozen_target(target))
    first = TrainableDrafter(replace(trained.config, convolutions=None, selector=None))
    first.load_state_dict(trained.state_dict(), strict=False)
    features, blocks = torch.randn(1, 9, 64), torch.randn(1, 2, 4, 32)
    anchors = torch.tensor([[3, 8]])
    torch.testing.assert_close(trained(features, blocks, anchors), first(features, blocks, anchors))
    before, after = torch.tensor([1, 2, 3]), torch.arange(64)
    assert not trained.candidate_selector.scores(torch.randn(3, 32), before, after).any()


def test_added_layers_have_no_effect_at_first(target: Path, tmp_path: Path):
    frozen = frozen_target(target)
    first = TrainableDrafter(replace(drafter_config(frozen.spec, SECOND, MASK_ID), convolutions=None))
    shuffle_weights(first)
    export_drafter(first, frozen.spec, tmp_path)
    config = continued(check_drafter(tmp_path, facts_of(frozen.spec)), DrafterSettings(num_layers=4), None)
    deeper = new_drafter(config, frozen.weights, tmp_path)
    assert (len(first.layers), len(deeper.layers)) == (2, 4)
    assert deeper.layers[3].self_attn.q_proj.weight.equal(first.layers[1].self_attn.q_proj.weight)
    features, blocks = torch.randn(1, 9, 64), torch.randn(1, 2, 4, 32)
    anchors = torch.tensor([[3, 8]])
    assert deeper(features, blocks, anchors).equal(first(features, blocks, anchors))


def test_a_convolution_sees_the_row_before_and_no_other_block():
    drafter = TrainableDrafter(small_config(convolutions=ConvolutionSize(2, 16)))
    shuffle_weights(drafter)
    for layer in drafter.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)  # the rest acts on single rows
    features, blocks = torch.randn(1, 9, 64), torch.randn(1, 2, 4, 32)
    changed = blocks.clone()
    changed[0, 0, 1] += 1.0
    anchors = torch.tensor([[3, 8]])
    moved = (drafter(features, blocks, anchors) != drafter(features, changed, anchors)).any(-1)[0]
    assert moved.tolist() == [[False, True, True, True], [False] * 4], "a row further with every layer"


def test_an_exported_head_drafts_the_chains_it_was_trained_on(tmp_path: Path, tiny_qwen3: Path):
    """The engine's drafter loads the file, and the published mathematics gives the same logits."""
    spec = read_model(tiny_qwen3)
    config = eagle_config(spec, EagleSettings(num_taps=3))
    head = EagleHead(replace(config, target_layer_ids=(0, 1, 2), rms_norm_eps=1e-5))
    shuffle_weights(head)
    export_eagle_head(head, spec, tmp_path)
    facts = TargetFacts(hidden_size=64, num_layers=4, vocab_size=128, max_model_len=128)
    generator = torch.Generator().manual_seed(5)
    embedding, out = (torch.randn(128, 64, generator=generator) * 0.2 for _ in range(2))
    served = load_eagle3(tmp_path, facts, EmbeddingCopies(embedding, Linear(out)), torch.float32, "cpu")
    assert served.config.target_layer_ids == (0, 1, 2)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written[key] for key in EAGLE3_BLOCK if key in written and key != "vocab_size"} == {
        key: value
        for key, value in EAGLE3_BLOCK.items()
        if key in written and key not in ("vocab_size", "max_position_embeddings")
    } | {"max_position_embeddings": 512}
    oracle = Eagle3Oracle(written, load_file(tmp_path / "model.safetensors"), embedding, out)
    taps = torch.randn(9, 3, 64, generator=generator)
    tokens = torch.randint(0, 128, (10,), generator=generator).tolist()
    drafts, logits = oracle.chain(taps, tokens, 3, lambda z, _: int(z.argmax()))
    with torch.no_grad():
        chains = head.chains(taps.flatten(1)[None])
        read = torch.tensor(tokens[1:])
        for depth in range(3):
            ours = F.linear(chains.step(embedding[read][None])[0, -1], out)
            torch.testing.assert_close(ours, logits[depth], rtol=1e-4, atol=1e-4)
            read[-1] = drafts[depth]


@pytest.mark.parametrize(
    "settings", [SECOND, pytest.param(EAGLE, marks=pytest.mark.if_changed)], ids=["dflash2", "eagle3"]
)
def test_a_drafter_learns_and_writes_its_curves(settings: TrainSettings, target: Path, tmp_path: Path):
    reported: list[str] = []
    run = (target, continuations(), continuations(), tmp_path, Length(steps=30))
    how: dict[str, Any] = {"mask_token_id": MASK_ID} if settings is SECOND else {"make": make_head}
    how["loop_settings"] = LoopSettings(report_every_s=0.0)
    trained = train(*run, settings=settings, report=reported.append, **how)
    assert trained.held_out_after["loss"] < trained.held_out_before["loss"]
    rows = read_rows(trained.curves)
    assert [row["step"] for row in rows if "loss" in row] == list(range(30))
    assert [row["step"] for row in rows if "held_out" in row] == [0, 30]
    drawn = (tmp_path / "curves.svg").read_text()
    titles = ("loss", "tokens per step", "acceptance of the first draft", "learning rate")
    assert all(f">{title}" in drawn for title in titles)
    assert (drawn.count(">training</text>"), drawn.count(">held out</text>")) == (4, 3)
    assert (trained.drafter / "config.json").exists() and any(
        "step 25 of 30 (80.0%)" in line for line in reported
    )
    (room,) = (line for line in reported if "has time for" in line)
    assert room == "training has time for 30 steps; a useful drafter needs about 1,300"
    if settings is SECOND:
        codebook = load_file(trained.drafter / "model.safetensors")["candidate_selector.successor_codebook"]
        assert codebook.any(), "the selector speaks"


def test_a_chains_later_tokens_see_their_drafts_and_no_other_chain(target: Path):
    head = eagle_head(frozen_target(target))
    shuffle_weights(head)
    features, first, second = torch.randn(1, 7, 64), torch.randn(1, 7, 32), torch.randn(1, 7, 32)
    changed = second.clone()
    changed[0, 4] += 1.0

    def hidden(at_second: torch.Tensor) -> torch.Tensor:
        chains = head.chains(features)
        chains.step(first)
        chains.step(at_second)
        return chains.step(first)[0]

    moved = (hidden(second) != hidden(changed)).any(-1)
    assert moved.tolist() == [row == 4 for row in range(7)]


def test_a_card_describes_training_and_quality(tmp_path: Path):
    options = TrainOptions(target="owner/target", folder=tmp_path, data=("mine.jsonl",), head="dflash2")
    trained = Trained(
        drafter=tmp_path,
        curves=tmp_path / "curves.jsonl",
        num_steps=9,
        num_tokens=900,
        used_s=60.0,
        held_out_before={"tokens_per_step": 1.2},
        held_out_after={"tokens_per_step": 2.5, "accepted": 0.7},
    )
    write_drafter_card(options, trained, num_data_tokens=2_000_000, num_held_out=12)
    card = (tmp_path / "README.md").read_text()
    assert "DFlash2 drafter for owner/target" in card and "9 steps" in card
    assert min_card_length(tmp_path) == 2.5, "as `manta plan` reads it"
