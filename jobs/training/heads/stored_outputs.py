"""The target's outputs in training: computes those that are not stored, once, and reads them by batch.

`actors/capture/target_outputs.py` defines the files. The losses see only a batch's *candidates*: the tokens
of its answers, the teacher's likeliest tokens at each position, and a sample of the others, which stands for
all of them in the drafter's partition sum.

Shapes: B sequences, T tokens, F tapped features, M answer positions of a batch, K stored tokens, C candidates
of which S are sampled, V vocabulary.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ....actors.capture.target_outputs import (
    OutputLayout,
    OutputShardWriter,
    SequenceOutputs,
    TargetOutputs,
    likeliest_tokens,
    sequence_key,
)
from ....actors.targets.model.tensor_parallel import Communicator
from ....cluster.errors import ConfigError
from ...common.progress import format_duration
from ..loop.answering import keep_seconds_used, seconds_used
from ..loop.continuations import ContinuationReader, Continuations, PaddedBatch
from ..loop.precision import product_dtype
from ..loop.training_loop import Report, TimeBudget
from .frozen_target import FrozenTarget

SEQUENCES_PER_SHARD = 128
_BATCH_SIZE = 8
TEACHER_TOKENS = 16  # of a position that are candidates
SAMPLED_TOKENS = 512
_LINE_S = 30.0  # between two reports


@dataclass(frozen=True)
class BatchCandidates:
    """Tokens with logits in a batch: the wanted ones in ascending order, then a sample of all others.

    `bias_C` is added to their logits, since a sampled token stands for several.
    """

    wanted_W: torch.Tensor
    token_ids_C: torch.Tensor
    bias_C: torch.Tensor

    def find(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the places of wanted tokens among the candidates; other tokens get any place."""
        return torch.searchsorted(self.wanted_W, token_ids.contiguous()).clamp(max=len(self.wanted_W) - 1)


@dataclass(frozen=True)
class BatchOutputs:
    """Outputs of the target for a padded batch.

    Attributes:
        features_BTF: tapped features in `product_dtype`, zero at a sequence's last token and after it.
        likeliest_MK, log_probs_MK: likeliest tokens (int64) and log-probabilities (fp32) of all sequences.
        answers_M: the tokens at the answer positions.
        starts_B, last_B: the row of position p of sequence b is `starts_B[b] + p`, up to p = `last_B[b]`.
    """

    features_BTF: torch.Tensor
    likeliest_MK: torch.Tensor
    log_probs_MK: torch.Tensor
    answers_M: torch.Tensor
    starts_B: torch.Tensor
    last_B: torch.Tensor

    def rows(self, positions_Bx: torch.Tensor) -> torch.Tensor:
        """Return the rows of predictions of these positions; after the end, of the last one."""
        shape = (-1, *[1] * (positions_Bx.ndim - 1))
        return self.starts_B.view(shape) + torch.minimum(positions_Bx, self.last_B.view(shape))

    def candidates(self, vocab_size: int, seed: int) -> BatchCandidates:
        wanted = torch.cat([self.likeliest_MK[:, :TEACHER_TOKENS].flatten(), self.answers_M])
        is_wanted_V = torch.zeros(vocab_size, dtype=torch.bool, device=wanted.device)
        is_wanted_V[wanted] = True
        wanted_W, others = is_wanted_V.nonzero().squeeze(1), (~is_wanted_V).nonzero().squeeze(1)
        order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
        sampled = others[order[:SAMPLED_TOKENS].to(others.device)]
        bias_C = torch.zeros(len(wanted_W) + len(sampled), device=wanted.device)
        bias_C[len(wanted_W) :] = math.log(max(1, len(others)) / max(1, len(sampled)))
        return BatchCandidates(wanted_W, torch.cat([wanted_W, sampled]), bias_C)

    def teacher_logits(self, candidates: BatchCandidates) -> torch.Tensor:
        """Return the target's log-probabilities of the candidates, [M, C].

        What is left for other tokens is spread over the sampled ones.
        """
        places_MK, num_wanted = candidates.find(self.likeliest_MK), len(candidates.wanted_W)
        p_MK = self.log_probs_MK.exp() * (candidates.wanted_W[places_MK] == self.likeliest_MK)
        p_MC = torch.zeros(len(p_MK), len(candidates.token_ids_C), device=p_MK.device)
        p_MC.scatter_add_(1, places_MK, p_MK)
        left_M1 = (1.0 - p_MK.sum(dim=-1, keepdim=True)).clamp(min=0.0)
        p_MC[:, num_wanted:] = left_M1 / max(1, p_MC.shape[1] - num_wanted)
        return p_MC.log_()


class StoredOutputs:
    """Reads stored outputs by batch."""

    def __init__(self, layout: OutputLayout, folders: Sequence[Path], device: torch.device) -> None:
        self._outputs, self._layout, self._device = TargetOutputs(layout, folders), layout, device

    def indices(self, data: Continuations) -> np.ndarray:
        """Return which sequences are stored."""
        found = [i for i, (ids, first) in enumerate(_sequences(data)) if self._outputs.has(ids, first)]
        return np.array(found, dtype=np.int64)

    def read(self, batch: PaddedBatch) -> BatchOutputs:
        device, lengths, first = self._device, batch.length.tolist(), batch.first.tolist()
        sequences = [ids[:n] for ids, n in zip(batch.tokens, lengths, strict=True)]
        features_BTF = np.zeros((*batch.tokens.shape, self._layout.num_features), dtype=np.uint16)
        found: list[SequenceOutputs] = []
        for row, (ids, f) in enumerate(zip(sequences, first, strict=True)):
            outputs = self._outputs.of(ids, f)
            features_BTF[row, : len(outputs.taps)] = outputs.taps
            found.append(outputs)
        rows_B = batch.length - batch.first
        answers = [ids[f:] for ids, f in zip(sequences, first, strict=True)]
        return BatchOutputs(
            torch.from_numpy(features_BTF).view(torch.bfloat16).to(device, product_dtype(device.type)),
            torch.from_numpy(np.concatenate([each.likeliest_ids for each in found])).to(device).long(),
            torch.from_numpy(np.concatenate([each.log_probs for each in found])).to(device).float(),
            torch.from_numpy(np.concatenate(answers)).to(device),
            torch.from_numpy(np.cumsum(rows_B) - rows_B - batch.first).to(device),
            torch.from_numpy(batch.length - 1).to(device),
        )


def store_outputs(
    target: FrozenTarget,
    layout: OutputLayout,
    held_out: Continuations,
    data: Continuations,
    recorded: Sequence[Path],
    folder: Path,
    budget_s: float,
    report: Report,
    workers: Communicator,
) -> StoredOutputs:
    """Compute the outputs that the engine has not recorded, of the data until the time is over.

    Sequences are computed in a random order and in groups that depend on the data alone: an interrupted pass
    continues, to the same bits. Each worker computes every n-th shard, and at least one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = TargetOutputs(layout, recorded)
    always, further = (_shards(_missing(each, known)) for each in (held_out, data))
    mine = [*always, *further][workers.rank :: workers.world_size]
    done = StoredOutputs(layout, [folder], target.device)
    is_done = [len(done.indices(shard)) == len(shard) for shard in mine]
    left = [shard for shard, it_is in zip(mine, is_done, strict=True) if not it_is]
    budget = TimeBudget(budget_s, seconds_used(folder))
    progress = _Progress(left, report)
    if left:
        _check_disk(layout, left, folder, report)
    for number, shard in enumerate(mine):
        if number > len(always) and budget.progress >= 1.0:
            break
        if not is_done[number]:
            _write_shard(target, layout, shard, folder)
            progress.update(shard)
            if workers.rank == 0:
                keep_seconds_used(folder, budget.used_s)
    workers.all_reduce(torch.zeros(1, device=target.device))  # barrier: all have written
    return StoredOutputs(layout, [*recorded, folder], target.device)


def _sequences(data: Continuations) -> Iterator[tuple[np.ndarray, int]]:
    for i, first in enumerate(data.first.tolist()):
        yield data.ids[data.bounds[i] : data.bounds[i + 1]], first


def _missing(data: Continuations, known: TargetOutputs) -> Continuations:
    """Return the distinct sequences that are not known."""
    missing = {
        sequence_key(ids, first): i
        for i, (ids, first) in enumerate(_sequences(data))
        if not known.has(ids, first)
    }
    return data.take([*missing.values()])


def _shards(data: Continuations) -> list[Continuations]:
    order = np.random.default_rng(0).permutation(len(data))
    return [
        data.take(order[start : start + SEQUENCES_PER_SHARD])
        for start in range(0, len(data), SEQUENCES_PER_SHARD)
    ]


def _write_shard(target: FrozenTarget, layout: OutputLayout, data: Continuations, folder: Path) -> None:
    by_length = np.argsort(np.diff(data.bounds), kind="stable")
    reader = ContinuationReader(data, 1, pad_id=0)
    ids, first = next(_sequences(data))
    with OutputShardWriter(folder, f"{sequence_key(ids, first):016x}", layout) as shard:
        for start in range(0, len(data), _BATCH_SIZE):
            batch = reader.pad(by_length[start : start + _BATCH_SIZE])
            features_BTF, hidden_BTH = target.read(torch.from_numpy(batch.tokens).to(target.device))
            bits_BTF = features_BTF.bfloat16().cpu().view(torch.uint16).numpy()
            for ids, f, n, bits_TF, hidden_TH in zip(
                batch.tokens, batch.first.tolist(), batch.length.tolist(), bits_BTF, hidden_BTH, strict=True
            ):
                likeliest, log_probs = likeliest_tokens(target.logits(hidden_TH[f - 1 : n - 1]))
                outputs = SequenceOutputs(bits_TF[: n - 1], likeliest.cpu().numpy(), log_probs.cpu().numpy())
                shard.add(ids[:n], f, outputs)


def _check_disk(layout: OutputLayout, shards: Sequence[Continuations], folder: Path, report: Report) -> None:
    num_tokens = sum(len(shard.ids) for shard in shards)
    num_answer_tokens = num_tokens - sum(int(shard.first.sum()) for shard in shards)
    free = shutil.disk_usage(folder).free
    sentence = layout.describe_size(num_tokens, num_answer_tokens)
    report(f"{folder}: {sentence}")
    if free < layout.num_bytes(num_tokens, num_answer_tokens):
        raise ConfigError(
            f"output: {sentence}; {folder} has {free / 1e9:.2f} GB free. Choose another folder, or give less "
            "data.",
            param="output",
        )


class _Progress:
    """Reports the sequences that are done, the rate and the time left, at most once in _LINE_S."""

    def __init__(self, shards: Sequence[Continuations], report: Report) -> None:
        self._total = sum(len(shard.ids) for shard in shards)
        self._report, self._done = report, 0
        self._begin_s = self._shown_s = time.monotonic()

    def update(self, shard: Continuations) -> None:
        self._done += len(shard.ids)
        now_s = time.monotonic()
        if now_s - self._shown_s < _LINE_S and self._done < self._total:
            return
        self._shown_s = now_s
        rate = self._done / max(now_s - self._begin_s, 1e-9)
        left = format_duration((self._total - self._done) / rate)
        self._report(
            f"the target's outputs: {self._done} of {self._total} tokens, {rate:.0f}/s, about {left} left"
        )
