"""Drafter training: what a block sees, which positions count, and that a killed run loses nothing."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.drafter.dflash.target_features import usual_layer_ids
from manta.jobs.training.heads.chunked_cross_entropy import Teacher, row_losses
from manta.jobs.training.heads.dflash_loss import (
    block_losses,
    cut_blocks,
    dpace_weights,
    draw_anchors,
    draw_blocks,
    weighted_mean,
)
from manta.jobs.training.heads.dflash_module import TrainableDrafter
from manta.jobs.training.heads.frozen_target import FrozenTarget
from manta.jobs.training.heads.initialization import drafter_config, new_drafter
from manta.jobs.training.heads.recipes import DrafterSettings, Teaching
from manta.jobs.training.loop.continuations import ContinuationReader, Continuations
from manta.jobs.training.loop.training_loop import (
    load_snapshot,
    save_snapshot,
)
from support.checkpoints.training_targets import (
    CPU,
    continuations,
    random_target,
    small_config,
    stored_outputs,
    write_target,
)
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

CONFIG = small_config()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def frozen(folder: Path, layer_ids: tuple[int, ...] = (1, 2)) -> FrozenTarget:
    return FrozenTarget(folder, layer_ids, max_tokens=64, device=CPU)


@pytest.fixture
def drafter() -> TrainableDrafter:
    torch.manual_seed(0)
    return TrainableDrafter(CONFIG)


def inputs(num_tokens: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    anchors = torch.tensor([[3, 9, 9], [1, 15, 7]])
    features = torch.randn(2, num_tokens, 64, generator=generator)
    return features, torch.randn(2, 3, 4, 32, generator=generator), anchors


def test_many_blocks_in_one_pass_equal_one_block_at_a_time(drafter: TrainableDrafter):
    features, blocks, anchors = inputs()
    together = drafter(features, blocks, anchors)
    for row in range(2):
        for block in range(3):
            anchor = int(anchors[row, block])
            alone = drafter(
                features[row : row + 1, :anchor],
                blocks[row : row + 1, block : block + 1],
                anchors[row : row + 1, block : block + 1],
            )
            torch.testing.assert_close(together[row, block], alone[0, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_layers", [18, 36, 64])
def test_usual_taps_are_not_mistaken_for_the_other_convention(num_layers: int):
    ids = usual_layer_ids(num_layers, 5)
    assert not set(ids) & {i + 1 for i in ids}


def test_taps_follow_the_published_default():
    assert usual_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert usual_layer_ids(8, 1) == (4,)
    assert (usual_layer_ids(2, 5), usual_layer_ids(4, 5), usual_layer_ids(6, 5)) == ((0, 1), (1,), (1, 2, 3))


def test_slots_predict_the_token_at_their_own_position_and_stop_at_the_end():
    tokens = torch.arange(10, 22)[None]
    blocks = cut_blocks(tokens, torch.tensor([12]), torch.tensor([[2, 9]]), block_size=4, mask_id=99)
    assert blocks.inputs[0, 0].tolist() == [12, 99, 99, 99]
    assert blocks.labels[0, 0].tolist() == [13, 14, 15]
    assert blocks.is_counted[0].tolist() == [[True] * 3, [True, True, False]]


def test_anchors_lie_in_the_generated_part_and_leave_a_label():
    first, length = torch.tensor([3, 10]), torch.tensor([5, 40])
    anchors = draw_anchors(first, length, 500, torch.Generator().manual_seed(0))
    assert (anchors >= first[:, None]).all() and (anchors <= length[:, None] - 2).all()
    assert anchors[1].min() == 10 and anchors[1].max() == 38


def test_loss_weights_follow_their_formulas():
    losses = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))
    weights = dpace_weights(losses, alpha=0.5)
    for j in range(5):
        softened = 0.5 * torch.exp(-losses[1, 2]) + 0.5
        expected = sum(softened[: m + 1].prod() for m in range(j, 5))
        torch.testing.assert_close(weights[1, 2, j], expected)
    counted = torch.tensor([[[True, True, False, False, False]]])
    mean = weighted_mean(
        torch.tensor([[[1.0, 3.0, 9.0, 9.0, 9.0]]]), torch.tensor([1.0, 0.5, 1, 1, 1]), counted
    )
    torch.testing.assert_close(mean, torch.tensor(2.5 / 1.5))


@pytest.mark.parametrize("distance_share", [0.0, 0.7])
def test_losses_against_a_teacher_equal_torchs_in_value_and_gradient(distance_share: float):
    """The distance to the teacher is the share of rejected drafts."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 50, generator=generator, requires_grad=True)
    labels = torch.randint(0, 50, (300,), generator=generator)
    teacher_logits = torch.randn(40, 50, generator=generator)
    rows = torch.randint(0, 40, (300,), generator=generator)
    teacher = Teacher(teacher_logits, rows, share=0.3, distance_share=distance_share)
    losses = row_losses(logits, labels, teacher)
    p, log_q = teacher_logits.softmax(-1)[rows], logits.log_softmax(-1)
    entropy = 0.7 * F.cross_entropy(logits, labels, reduction="none") - 0.3 * (p * log_q).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    expected = (1.0 - distance_share) * entropy + distance_share * (1.0 - overlap)
    torch.testing.assert_close(losses.loss_R, expected)
    torch.testing.assert_close(losses.overlap_R, overlap)
    weights = torch.rand(300, generator=generator)
    (gradient,) = torch.autograd.grad((losses.loss_R * weights).sum(), logits)
    (reference,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(gradient, reference)


def test_the_teacher_of_a_slot_is_the_targets_row_before_it(target: Path, tmp_path: Path):
    """A drafter that copies the target's rows must overlap fully, so that any shift shows."""
    batch = ContinuationReader(continuations(), 4, pad_id=0).next_batch()
    hidden = random_target().model(torch.from_numpy(batch.tokens)).last_hidden_state

    class Copying(TrainableDrafter):
        def forward(self, features, blocks, anchors):
            positions = (anchors[..., None] + torch.arange(4) - 1).clamp(max=hidden.shape[1] - 1)
            return torch.stack([hidden[row][positions[row]] for row in range(len(hidden))])

    tokens = torch.from_numpy(batch.tokens)
    blocks = draw_blocks(batch, tokens, num_anchors=5, block_size=4, mask_id=63, seed=0)
    outputs = stored_outputs(frozen(target), (1, 2), continuations(), tmp_path).read(batch)
    candidates = outputs.candidates(64, seed=0)
    losses = block_losses(frozen(target), Copying(CONFIG), outputs, candidates, blocks, Teaching())
    overlap = losses.overlap_R.view_as(blocks.labels)[blocks.is_counted]
    assert overlap.min() > 0.98


def test_continuations_survive_saving_and_padding(tmp_path: Path):
    data = Continuations.join([continuations(5), continuations(7)])
    data.save(tmp_path / "data.npz")
    loaded = Continuations.load(tmp_path / "data.npz")
    batch = ContinuationReader(loaded, 12, pad_id=63).pad(np.arange(12))
    for row in range(12):
        start, end = data.bounds[row], data.bounds[row + 1]
        assert (batch.tokens[row, : batch.length[row]] == data.ids[start:end]).all()
        assert (batch.tokens[row, batch.length[row] :] == 63).all()
        assert batch.first[row] == data.first[row] < batch.length[row]


def test_a_kill_while_saving_leaves_the_last_snapshot_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "run" / "snapshot.pt"
    assert load_snapshot(path) is None
    save_snapshot(path, {"step": 1})

    def half_written(snapshot: object, file) -> None:
        file.write(b"PK half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(KeyboardInterrupt):
        save_snapshot(path, {"step": 2})
    assert load_snapshot(path) == {"step": 1}


def confident_target(folder: Path) -> Path:
    """A target as published ones: small weights of layers' norms, and logits with a large variance."""
    model = random_target()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("layernorm.weight"):
                weight.copy_(0.3 + 0.1 * torch.randn(weight.shape, generator=generator))
        model.model.norm.weight.fill_(1.8)
        model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def test_a_new_drafters_layers_attend_to_the_context_as_the_targets_own(tmp_path: Path):
    weights = frozen(confident_target(tmp_path)).weights
    settings = DrafterSettings(num_layers=2, block_sizes=(4,), num_taps=2)
    drafter = new_drafter(drafter_config(weights.spec, settings, 63), weights)
    model, states = Qwen3ForCausalLM.from_pretrained(tmp_path), torch.randn(5, 32) * 7.0
    for ours, theirs in zip(drafter.layers, (2, 5), strict=True):
        layer = model.model.layers[theirs]
        assert torch.equal(ours.mlp.down_proj.weight, layer.mlp.down_proj.weight)
        for kind in ("q_proj", "k_proj", "v_proj"):
            expected = getattr(layer.self_attn, kind)(layer.input_layernorm(states))
            context = getattr(ours.self_attn, kind)(drafter.hidden_norm(states))
            own = getattr(ours.self_attn, kind)(ours.input_layernorm(states))
            torch.testing.assert_close(context, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)


def test_a_new_drafter_starts_no_worse_than_a_uniform_guess(tmp_path: Path):
    """With the target's final norm, as copied, it would lose several times as much."""
    target = frozen(confident_target(tmp_path))
    settings = DrafterSettings(num_layers=2, block_sizes=(4,), num_taps=2)
    drafter = new_drafter(drafter_config(target.spec, settings, 63), target.weights)
    batch = ContinuationReader(continuations(), 12, pad_id=0).next_batch()
    tokens, uniform = torch.from_numpy(batch.tokens), math.log(64)
    blocks = draw_blocks(batch, tokens, 8, 4, 63, seed=0)
    features, _ = target.read(tokens)

    def start() -> float:
        with torch.no_grad():
            hidden = drafter(features, target.embed(blocks.inputs), blocks.anchors)[..., 1:, :]
        losses = row_losses(target.head(hidden.flatten(0, 2)), blocks.labels.flatten())
        return losses.loss_R.view_as(blocks.labels)[blocks.is_counted].mean().item()

    assert start() < 1.15 * uniform
    drafter.norm.weight.data.copy_(target.weights.final_norm())
    assert start() > 2.0 * uniform


# In a new process: in one with a large free block, blocks come from there.
MAPPED_BLOCKS = """
import torch
from manta.jobs.training.train_drafter import freed_memory_kept

def is_in_heap(num_bytes):
    block = torch.empty(num_bytes, dtype=torch.uint8)
    (heap,) = (line.split()[0] for line in open("/proc/self/maps") if line.endswith("[heap]\\n"))
    first, end = (int(address, 16) for address in heap.split("-"))
    return first <= block.data_ptr() < end

for _ in range(2):
    with freed_memory_kept():
        assert is_in_heap(2**26)
    assert not is_in_heap(2**29), "larger than all that was freed, which may be in the heap still"
"""


def test_large_blocks_are_mapped_one_by_one_again_after_training() -> None:
    subprocess.run([sys.executable, "-c", MAPPED_BLOCKS], check=True, timeout=600)
