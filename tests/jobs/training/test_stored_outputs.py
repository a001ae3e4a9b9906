"""The pass that stores a target's outputs, and the losses that read them, against exact ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from manta.actors.capture.target_outputs import (
    OutputLayout,
    OutputShardWriter,
    SequenceOutputs,
    TargetOutputs,
)
from manta.actors.targets.model.tensor_parallel import SingleRank
from manta.cluster.errors import ConfigError
from manta.jobs.training.heads import stored_outputs
from manta.jobs.training.heads.chunked_cross_entropy import Teacher, row_losses
from manta.jobs.training.heads.frozen_target import FrozenTarget
from manta.jobs.training.heads.recipes import Teaching
from manta.jobs.training.heads.stored_outputs import BatchOutputs, StoredOutputs, store_outputs
from manta.jobs.training.loop.answering import seconds_used
from manta.jobs.training.loop.continuations import ContinuationReader, Continuations
from support.checkpoints.training_targets import CPU, continuations, random_target, write_target
from torch.nn import functional as F

LAYER_IDS, DATA = (1, 3), continuations(20)
HELD_OUT, LEARNED = DATA.take(range(3)), DATA.take(range(3, 20))
LAYOUT = OutputLayout.of(LAYER_IDS, width=32, vocab_size=64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder = write_target(tmp_path_factory.mktemp("target"))
    return FrozenTarget(folder, LAYER_IDS, max_tokens=64, device=CPU)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_outputs, "SEQUENCES_PER_SHARD", 4)


def store(
    target: FrozenTarget,
    folder: Path,
    budget_s: float = math.inf,
    recorded: tuple[Path, ...] = (),
    **how: object,
) -> tuple[StoredOutputs, list[str]]:
    told: list[str] = []
    settings = {"report": told.append, "workers": SingleRank(), **how}
    return store_outputs(target, LAYOUT, HELD_OUT, LEARNED, recorded, folder, budget_s, **settings), told


def all_rows(data: Continuations, folder: Path) -> list[np.ndarray]:
    found = TargetOutputs(LAYOUT, [folder])
    sequences = (
        (data.ids[data.bounds[i] : data.bounds[i + 1]], int(data.first[i])) for i in range(len(data))
    )
    return [part for each in sequences if found.has(*each) for part in found.of(*each).arrays]


def test_stored_outputs_are_those_of_transformers(target: FrozenTarget, tmp_path: Path) -> None:
    stored, told = store(target, tmp_path)
    batch = ContinuationReader(DATA, 20, pad_id=0).pad(np.arange(20))
    outputs, model = stored.read(batch), random_target()
    with torch.no_grad():
        expected = model(torch.from_numpy(batch.tokens), output_hidden_states=True)
    taps = torch.cat([expected.hidden_states[i + 1] for i in LAYER_IDS], dim=-1)
    log_p = expected.logits.log_softmax(-1)
    for row, (n, f) in enumerate(zip(batch.length.tolist(), batch.first.tolist(), strict=True)):
        torch.testing.assert_close(
            outputs.features_BTF[row, : n - 1].float(), taps[row, : n - 1], atol=0.05, rtol=0.02
        )
        places = outputs.rows(torch.arange(f, n).expand(20, -1))[row]
        found = torch.zeros(n - f, 64).scatter(1, outputs.likeliest_MK[places], outputs.log_probs_MK[places])
        torch.testing.assert_close(found, log_p[row, f - 1 : n - 1], atol=0.02, rtol=0.02)
        assert outputs.answers_M[places].tolist() == batch.tokens[row, f:n].tolist()
    assert "2 taps x 32 x 2 bytes" in told[0]


def test_an_interrupted_pass_continues_to_the_same_bits(target: FrozenTarget, tmp_path: Path) -> None:
    store(target, tmp_path / "whole")

    class Dying(SimpleNamespace):
        left = 3

        def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return target.read(tokens)

    with pytest.raises(KeyboardInterrupt):
        store(Dying(device=CPU, logits=target.logits), tmp_path / "killed")  # type: ignore[arg-type]
    assert 0 < len(all_rows(DATA, tmp_path / "killed")) < 3 * len(DATA)
    store(target, tmp_path / "killed")
    parts = (all_rows(DATA, tmp_path / name) for name in ("whole", "killed"))
    assert all((one == other).all() for one, other in zip(*parts, strict=True))


def test_what_the_engine_recorded_is_not_computed_again(target: FrozenTarget, tmp_path: Path) -> None:
    ids, first = DATA.ids[: DATA.bounds[1]], int(DATA.first[0])
    answers = (len(ids) - first, 64)
    recorded = SequenceOutputs(
        np.full((len(ids) - 1, 64), 7, dtype=np.uint16),
        np.broadcast_to(np.arange(64, dtype=np.int32), answers),
        np.full(answers, -1.5, dtype=np.float16),
    )
    with OutputShardWriter(tmp_path / "answers", "part-000000", LAYOUT) as shard:
        shard.add(ids, first, recorded)
    stored, _ = store(target, tmp_path / "outputs", recorded=(tmp_path / "answers",))
    assert len(all_rows(DATA, tmp_path / "outputs")) == 3 * (len(DATA) - 1)
    read = stored.read(ContinuationReader(DATA, 1, pad_id=0).pad(np.array([0])))
    assert (read.log_probs_MK == -1.5).all()


def test_without_time_the_held_out_and_some_sequences_are_stored(
    target: FrozenTarget, tmp_path: Path
) -> None:
    for _ in range(2):  # a restarted run stores no more
        stored, _ = store(target, tmp_path, budget_s=1e-9)
        assert len(stored.indices(HELD_OUT)) == 3 and len(stored.indices(LEARNED)) == 4
    assert seconds_used(tmp_path) > 0.0


def test_workers_share_the_pass(target: FrozenTarget, tmp_path: Path) -> None:
    ranks = [SimpleNamespace(rank=rank, world_size=2, all_reduce=lambda tensor: tensor) for rank in range(2)]
    _, told = store(target, tmp_path, workers=ranks[0])
    stored, told_other = store(target, tmp_path, workers=ranks[1])
    assert len(stored.indices(DATA)) == len(DATA)
    assert len(told) == len(told_other) == 2, "both have computed something"


def test_a_full_disk_is_refused_before_anything_is_computed(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_outputs.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"output: the target's outputs take .* bytes; .* 0\.00 GB free"):
        store(target, tmp_path)


VOCAB, WIDTH, ROWS = 2000, 16, 60


def random_outputs(generator: torch.Generator) -> BatchOutputs:
    log_p = (torch.randn(ROWS, VOCAB, generator=generator) * 3.0).log_softmax(-1)
    top = log_p.topk(64)
    answers = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    none = torch.zeros(1, dtype=torch.int64)
    return BatchOutputs(torch.zeros(0), top.indices, top.values, answers, none, none)


@pytest.mark.parametrize(
    ("sampled", "num_seeds", "tolerance"),
    [(VOCAB, 1, 1e-5), pytest.param(128, 24, 0.15, marks=pytest.mark.if_changed)],
    ids=["all tokens", "a sample"],
)
@pytest.mark.parametrize("distance_share", [0.0, 0.7])
def test_the_candidates_loss_is_that_of_the_whole_vocabulary(
    sampled: int, num_seeds: int, tolerance: float, distance_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all other tokens as candidates exactly, with a sample of them on average; gradients, too."""
    monkeypatch.setattr(stored_outputs, "SAMPLED_TOKENS", sampled)
    generator = torch.Generator().manual_seed(0)
    outputs = random_outputs(generator)
    head = torch.randn(VOCAB, WIDTH, generator=generator)
    hidden = (torch.randn(ROWS, WIDTH, generator=generator) * 0.5).requires_grad_()
    shares, rows = (0.5, distance_share), torch.arange(ROWS)

    log_q = F.linear(hidden, head).log_softmax(-1)
    wanted = torch.zeros(VOCAB, dtype=torch.bool)
    wanted[outputs.likeliest_MK[:, : stored_outputs.TEACHER_TOKENS]] = wanted[outputs.answers_M] = True
    p = torch.zeros(ROWS, VOCAB).scatter(1, outputs.likeliest_MK, outputs.log_probs_MK.exp()) * wanted
    p += (1.0 - p.sum(-1, keepdim=True)) * ~wanted / (~wanted).sum()
    label_loss = F.nll_loss(log_q, outputs.answers_M, reduction="none")
    entropy = 0.5 * label_loss - 0.5 * (p * log_q).sum(-1)
    expected = (1 - distance_share) * entropy + distance_share * (1 - torch.minimum(p, log_q.exp()).sum(-1))
    (exact,) = torch.autograd.grad(expected.sum(), hidden)

    losses, gradients = torch.zeros(ROWS), torch.zeros_like(exact)
    for seed in range(num_seeds):
        candidates = outputs.candidates(VOCAB, seed)
        logits = F.linear(hidden, head[candidates.token_ids_C]) + candidates.bias_C
        teacher = Teacher(outputs.teacher_logits(candidates), rows, *shares)
        found = row_losses(logits, candidates.find(outputs.answers_M), teacher)
        losses += found.loss_R.detach() / num_seeds
        gradients += torch.autograd.grad(found.loss_R.sum(), hidden)[0] / num_seeds
    assert (losses - expected).norm() < tolerance * expected.norm()
    assert (gradients - exact).norm() < tolerance * exact.norm()


def test_the_distance_gets_its_weight_between_one_and_two_thirds_of_a_run() -> None:
    teaching = Teaching(distance_share=0.6)
    shares = [teaching.at(progress).distance_share for progress in (0.0, 1 / 3, 0.5, 2 / 3, 1.0)]
    assert shares == pytest.approx([0.0, 0.0, 0.3, 0.6, 0.6])
    assert replace(teaching, distance_from=0.0).at(0.0).distance_share == 0.6, "a trained drafter's"
