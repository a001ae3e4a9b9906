"""Training data of a drafter: prompts with the target's continuations, and batches of them.

`answering.py` generates the continuations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MIN_ANSWER_TOKENS = 2  # shorter answers have no label


@dataclass(frozen=True)
class ContinuationRequest:
    prompt_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Continuations:
    """Token sequences: s is ids[bounds[s]:bounds[s + 1]] (uint32), generated from position first[s] on."""

    ids: np.ndarray
    bounds: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def of(cls, questions: Sequence[ContinuationRequest], answers: Sequence[Sequence[int]]) -> Continuations:
        return cls.of_pairs((q.prompt_ids, answer) for q, answer in zip(questions, answers, strict=True))

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Continuations:
        """Make sequences of prompts and answers, without answers below MIN_ANSWER_TOKENS."""
        kept = [
            (max(1, len(prompt)), [*prompt, *answer])
            for prompt, answer in pairs
            if len(answer) >= MIN_ANSWER_TOKENS
        ]
        sequences = [np.array(sequence, dtype=np.uint32) for _, sequence in kept]
        ids = np.concatenate([np.zeros(0, dtype=np.uint32), *sequences])
        bounds = np.cumsum([0, *map(len, sequences)])
        return cls(ids, bounds, np.array([first for first, _ in kept], dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Continuations]) -> Continuations:
        lengths = np.concatenate([np.diff(part.bounds) for part in parts])
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([[0], np.cumsum(lengths)]),
            np.concatenate([part.first for part in parts]),
        )

    def take(self, chosen: Sequence[int] | np.ndarray) -> Continuations:
        spans = [self.ids[self.bounds[i] : self.bounds[i + 1]] for i in chosen]
        bounds = np.cumsum([0, *map(len, spans)])
        ids = np.concatenate([np.zeros(0, dtype=self.ids.dtype), *spans])
        return Continuations(ids, bounds, self.first[np.asarray(chosen, dtype=np.int64)])

    def split_off(self, num_held_out: int) -> tuple[Continuations, Continuations]:
        held_out = np.linspace(0, len(self) - 1, num_held_out).round().astype(np.int64)
        return self.take(np.setdiff1d(np.arange(len(self)), held_out)), self.take(np.unique(held_out))

    @property
    def longest(self) -> int:
        return int(np.diff(self.bounds).max(initial=0))

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for part in (self.ids, self.bounds, self.first):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def save(self, path: Path, **more: np.ndarray) -> None:
        """Write a file that appears complete or not at all, with further arrays by name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".partial.npz")
        np.savez(temporary, allow_pickle=False, ids=self.ids, bounds=self.bounds, first=self.first, **more)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Continuations:
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["bounds"], arrays["first"])


@dataclass(frozen=True)
class PaddedBatch:
    """`tokens` int64 [B, T], right-padded; positions `first` to `length` (each [B]) are generated."""

    tokens: np.ndarray
    first: np.ndarray
    length: np.ndarray

    def part(self, worker: int, num_workers: int) -> PaddedBatch:
        mine = slice(worker, None, num_workers)
        length = self.length[mine]
        return PaddedBatch(self.tokens[mine, : length.max()], self.first[mine], length)


class ContinuationReader:
    """Endless batches of sequences of similar length; reshuffled every epoch."""

    _SORTED_BATCHES = 16

    def __init__(self, data: Continuations, batch_size: int, pad_id: int) -> None:
        assert len(data) >= batch_size, "fewer continuations than one batch"
        self._data, self._batch_size, self._pad_id = data, batch_size, pad_id
        self.seek((0, 0))

    @property
    def position(self) -> tuple[int, int]:
        return self._epoch, self._batch

    def seek(self, position: tuple[int, int]) -> None:
        self._epoch, self._batch = position
        self._batches = self._order(self._epoch)

    def next_batch(self) -> PaddedBatch:
        if self._batch == len(self._batches):
            self.seek((self._epoch + 1, 0))
        chosen = self._batches[self._batch]
        self._batch += 1
        return self.pad(chosen)

    def pad(self, chosen: np.ndarray) -> PaddedBatch:
        starts, ends = self._data.bounds[chosen], self._data.bounds[chosen + 1]
        length = ends - starts
        tokens = np.full((len(chosen), length.max()), self._pad_id, dtype=np.int64)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            tokens[row, : end - start] = self._data.ids[start:end]
        return PaddedBatch(tokens, self._data.first[chosen], length)

    def _order(self, epoch: int) -> np.ndarray:
        """Return sequence indices [batches, B]: shuffled, sorted by length within pools, batches shuffled."""
        random = np.random.default_rng(epoch)
        num_batches = len(self._data) // self._batch_size
        order = random.permutation(len(self._data))[: num_batches * self._batch_size]
        lengths = np.diff(self._data.bounds)
        pool = self._batch_size * self._SORTED_BATCHES
        pools = [order[at : at + pool] for at in range(0, len(order), pool)]
        ordered = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in pools])
        return random.permutation(ordered.reshape(num_batches, self._batch_size))
