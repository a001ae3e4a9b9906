"""Training data of a drafter: prompts with the target's continuations, which this engine generates.

Continuations are stored in shards as they are finished, so that a restarted run repeats only the current
shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....actors.llm import LLM
from ....cluster.request.request import SamplingParams
from .training_loop import Report, TimeBudget

# Sampling temperatures of the training data, used in turn.
TEMPERATURES = (1.0, 0.7, 1.0, 0.0)
QUESTIONS_PER_SHARD = 512
MAX_NEW_TOKENS = 192
NUM_RUNNING = 64  # concurrent continuations


@dataclass(frozen=True)
class ContinuationRequest:
    prompt_ids: tuple[int, ...]
    temperature: float
    seed: int


# Returns the token ids of the continuations, including the end token, in the order of the questions.
Generate = Callable[[Sequence[ContinuationRequest]], list[list[int]]]


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
        """Make sequences of prompts and answers, without answers below two tokens (no label)."""
        kept = [(max(1, len(prompt)), [*prompt, *answer]) for prompt, answer in pairs if len(answer) >= 2]
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

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".partial.npz")
        np.savez(temporary, ids=self.ids, bounds=self.bounds, first=self.first)
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


def write_continuations(
    target_dir: str | Path,
    asked: Sequence[ContinuationRequest],
    folder: Path,
    budget_s: float,
    report: Report,
    truncate: Callable[[Sequence[int]], list[int]] = list,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Continuations:
    """Generate continuations (cut by `truncate`) in shards until all are done or the time is over."""
    used = folder / "used_s"  # seconds spent by earlier processes of this run
    budget = TimeBudget(budget_s, float(used.read_text()) if used.exists() else 0.0)
    shards: list[Continuations] = []
    with LLM(str(target_dir), max_num_seqs=NUM_RUNNING) as llm:
        generate = generator(llm, max_new_tokens)
        for start in range(0, len(asked), QUESTIONS_PER_SHARD):
            path = folder / f"{start:06}.npz"
            if not path.exists():
                if shards and budget.progress >= 1.0:
                    break
                part = asked[start : start + QUESTIONS_PER_SHARD]
                Continuations.of(part, [truncate(answer) for answer in generate(part)]).save(path)
                used.write_text(f"{budget.used_s:.1f}")
            shards.append(Continuations.load(path))
            report(f"{folder.name}: {start + len(shards[-1])} of {len(asked)}")
    return Continuations.join(shards)


def generator(llm: LLM, max_new_tokens: int) -> Generate:
    def generate(asked: Sequence[ContinuationRequest]) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=q.temperature, seed=q.seed, max_tokens=max_new_tokens, detokenize=False
            )
            for q in asked
        ]
        outputs = llm.generate([list(q.prompt_ids) for q in asked], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate
