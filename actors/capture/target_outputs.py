"""The frozen target's outputs for token sequences, stored so that no training step computes them again.

One shard is a folder `NAME.outputs` of memory maps, usually next to the continuations `NAME.npz`:

    taps.npy             uint16  [sum of (n - 1), F]   bits of bf16: tapped features of positions 0 .. n - 2
    likeliest_ids.npy    int32   [sum of (n - f), K]   the target's likeliest tokens, likeliest first
    log_probs.npy        float16 [sum of (n - f), K]   their log-probabilities at temperature 1
    sequences.npz        layout, and by sequence its key, number of tokens n, and of those of the prompt f

A sequence of n tokens with a prompt of f (at least 1) has a row of likeliest tokens for each answer position
f .. n - 1: what the target predicts there, computed from the tokens before it. Its last token has no taps,
since no token follows it. Sequences are found by their content (`sequence_key`), so that data may be joined,
split and repeated. The engine writes shards while it answers; `jobs/training/` writes what is missing and
reads them.

Shapes: n and f as above, F features of all taps together, K likeliest tokens, M rows, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

NUM_LIKELIEST = 64
_SUFFIX, _INDEX = ".outputs", "sequences.npz"
_DTYPES = {
    "taps": np.dtype(np.uint16),
    "likeliest_ids": np.dtype(np.int32),
    "log_probs": np.dtype(np.float16),
}


def sequence_key(ids: Sequence[int] | np.ndarray, first: int) -> int:
    """Return the key of a sequence whose answer starts at position `first`, 64 bits."""
    content = np.asarray(ids, dtype=np.uint32).tobytes() + int(first).to_bytes(8, "little")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def likeliest_tokens(
    logits_MV: torch.Tensor, count: int = NUM_LIKELIEST
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids (int32) and log-probabilities (fp16) of the likeliest tokens by row, [M, K]."""
    logits_MV = logits_MV.float()
    top_MK, ids_MK = logits_MV.topk(min(count, logits_MV.shape[-1]), dim=-1)
    return ids_MK.int(), (top_MK - logits_MV.logsumexp(dim=-1, keepdim=True)).half()


@dataclass(frozen=True)
class SequenceOutputs:
    """Outputs for one sequence, with the rows and dtypes above; those that are read are views of a shard."""

    taps: np.ndarray
    likeliest_ids: np.ndarray
    log_probs: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.taps, self.likeliest_ids, self.log_probs


@dataclass(frozen=True)
class OutputLayout:
    """What is stored: taps after layers (0-based, in the drafter's order) of this width, likeliest tokens."""

    layer_ids: tuple[int, ...]
    width: int
    num_likeliest: int

    @classmethod
    def of(cls, layer_ids: Sequence[int], width: int, vocab_size: int) -> OutputLayout:
        return cls(tuple(layer_ids), width, min(NUM_LIKELIEST, vocab_size))

    @classmethod
    def read(cls, header: Sequence[int]) -> OutputLayout:
        num_likeliest, width, *layer_ids = header
        return cls(tuple(layer_ids), width, num_likeliest)

    def has(self, other: OutputLayout) -> bool:
        """Return whether all of another layout is stored in this one."""
        same = (self.width, self.num_likeliest) == (other.width, other.num_likeliest)
        return same and set(self.layer_ids) >= set(other.layer_ids)

    def columns(self, layer_ids: Sequence[int]) -> np.ndarray:
        """Return the columns of these layers' taps."""
        starts = np.array([self.layer_ids.index(layer_id) for layer_id in layer_ids]) * self.width
        return (starts[:, None] + np.arange(self.width)).ravel()

    @property
    def num_features(self) -> int:
        return len(self.layer_ids) * self.width

    @property
    def header(self) -> list[int]:
        return [self.num_likeliest, self.width, *self.layer_ids]

    def num_bytes(self, num_tokens: int, num_answer_tokens: int) -> int:
        return num_tokens * self.num_features * 2 + num_answer_tokens * self.num_likeliest * 6

    def describe_size(self, num_tokens: int, num_answer_tokens: int) -> str:
        """Return a sentence with the size on disk, for reports before anything is written."""
        size_gb = self.num_bytes(num_tokens, num_answer_tokens) / 1e9
        return (
            f"the target's outputs take {size_gb:.2f} GB: {num_tokens} tokens x {len(self.layer_ids)} taps x "
            f"{self.width} x 2 bytes + {num_answer_tokens} answer tokens x {self.num_likeliest} x 6 bytes"
        )


class OutputShardWriter:
    """Writes one shard, sequence by sequence; as a context manager, it appears complete or not at all."""

    def __init__(self, folder: Path, name: str, layout: OutputLayout) -> None:
        self._path, self._partial = folder / (name + _SUFFIX), folder / f"{name}.partial"
        self._layout = layout
        self._columns = (layout.num_features, layout.num_likeliest, layout.num_likeliest)
        self._sequences: list[tuple[int, int, int]] = []  # key, n, f

    def __enter__(self) -> OutputShardWriter:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._files = [(self._partial / f"{part}.npy").open("wb") for part in _DTYPES]
        self._write_headers()
        return self

    def add(self, ids: Sequence[int] | np.ndarray, first: int, outputs: SequenceOutputs) -> None:
        """Append the outputs for a sequence whose answer starts at position `first`."""
        num_answers = len(ids) - first
        shapes = zip((len(ids) - 1, num_answers, num_answers), self._columns, strict=True)
        for file, part, dtype, shape in zip(
            self._files, outputs.arrays, _DTYPES.values(), shapes, strict=True
        ):
            found, expected = (part.shape, part.dtype), (shape, dtype)
            assert found == expected, f"{file.name}: {found} instead of {expected}"
            file.write(np.ascontiguousarray(part).data)
        self._sequences.append((sequence_key(ids, first), len(ids), first))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write_headers()
        for file in self._files:
            file.close()
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        table = np.array(self._sequences, dtype=np.uint64).reshape(-1, 3)
        np.savez(self._partial / _INDEX, layout=self._layout.header, sequences=table)
        shutil.rmtree(self._path, ignore_errors=True)
        self._partial.replace(self._path)

    def _write_headers(self) -> None:
        """Write the headers for the rows so far; NumPy pads them, so that the first axis can grow."""
        num_taps = sum(n - 1 for _, n, _ in self._sequences)
        num_answers = sum(n - f for _, n, f in self._sequences)
        shapes = zip((num_taps, num_answers, num_answers), self._columns, strict=True)
        for file, dtype, shape in zip(self._files, _DTYPES.values(), shapes, strict=True):
            file.seek(0)
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)


class TargetOutputs:
    """Reads the complete shards of these folders that have this layout, or one with more taps."""

    def __init__(self, layout: OutputLayout, folders: Iterable[Path]) -> None:
        self._layout = layout
        self._found: dict[int, tuple[SequenceOutputs, np.ndarray | None]] = {}  # None: all columns of taps
        for folder in folders:
            for path in sorted(folder.glob("*" + _SUFFIX)):
                self._open(path)

    def _open(self, path: Path) -> None:
        with np.load(path / _INDEX) as index:
            stored, sequences = OutputLayout.read(index["layout"].tolist()), index["sequences"].tolist()
        if not stored.has(self._layout) or not sequences:  # an empty file cannot be mapped
            return
        columns = None if stored == self._layout else stored.columns(self._layout.layer_ids)
        taps, likeliest_ids, log_probs = (np.load(path / f"{part}.npy", mmap_mode="r") for part in _DTYPES)
        tap, answer = 0, 0
        for key, n, f in sequences:
            taps_of, answers_of = slice(tap, tap + n - 1), slice(answer, answer + n - f)
            outputs = SequenceOutputs(taps[taps_of], likeliest_ids[answers_of], log_probs[answers_of])
            self._found[key] = outputs, columns
            tap, answer = taps_of.stop, answers_of.stop

    def __len__(self) -> int:
        return len(self._found)

    def has(self, ids: Sequence[int] | np.ndarray, first: int) -> bool:
        return sequence_key(ids, first) in self._found

    def of(self, ids: Sequence[int] | np.ndarray, first: int) -> SequenceOutputs:
        """Return what is stored for a sequence whose answer starts at `first`; KeyError if nothing is."""
        outputs, columns = self._found[sequence_key(ids, first)]
        return outputs if columns is None else replace(outputs, taps=outputs.taps[:, columns])
