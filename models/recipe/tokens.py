"""Documents as token ids, and the windows of a training step.

A `TokenStore` has all ids in one array and the bounds of its pieces in another. Windows are cut from the
pieces in a new order every epoch. Epoch and offset identify them, so a resumed run continues at the next one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ...jobs.training.loop.continuations import Continuations
from .chat_samples import chat_samples, render_chat
from .corpus import CorpusFile
from .tokenizer import END_OF_TEXT, special_id

_PIECE_TOKENS = 2048
_CORPUS_SEQUENCE_TOKENS, _CORPUS_FIRST_TOKENS = 280, 40


@dataclass(frozen=True)
class TokenStore:
    """Token ids in pieces: `ids` uint16 [tokens]; piece p is ids[bounds[p]:bounds[p + 1]].

    A document ends with <|endoftext|>. A long one is split into several pieces; otherwise many steps in a
    row would consist of a single file.
    """

    ids: np.ndarray
    bounds: np.ndarray

    @property
    def num_pieces(self) -> int:
        return len(self.bounds) - 1

    def shuffled(self, seed: int) -> np.ndarray:
        """Return all ids with the pieces in a random order: uint16 [tokens]."""
        order = np.random.default_rng(seed).permutation(self.num_pieces)
        return np.concatenate([self.ids[self.bounds[p] : self.bounds[p + 1]] for p in order])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, ids=self.ids, bounds=self.bounds)

    @classmethod
    def load(cls, path: Path) -> "TokenStore":
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["bounds"])


def corpus_texts(files: Iterable[CorpusFile]) -> Iterator[str]:
    """Yield every document of the corpus: each file, followed by the chats made from it."""
    for file in files:
        yield file.text
        for messages in chat_samples(file):
            yield render_chat(messages)


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenStore:
    end = special_id(tokenizer, END_OF_TEXT)
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    documents = [np.array([*item.ids, end], dtype=np.uint16) for item in encoded]
    pieces = [d[at : at + _PIECE_TOKENS] for d in documents for at in range(0, len(d), _PIECE_TOKENS)]
    bounds = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return TokenStore(np.concatenate(documents), bounds)


def corpus_sequences(corpus: TokenStore, count: int, seed: int) -> Continuations:
    """Return pieces of the corpus as continuations, as if all but the beginning had been generated."""
    ids = corpus.shuffled(seed)[: count * _CORPUS_SEQUENCE_TOKENS]
    num_sequences = len(ids) // _CORPUS_SEQUENCE_TOKENS
    bounds = np.arange(num_sequences + 1) * _CORPUS_SEQUENCE_TOKENS
    first = np.full(num_sequences, _CORPUS_FIRST_TOKENS)
    return Continuations(ids[: bounds[-1]], bounds, first)


class WindowReader:
    """Yields batches of windows without end. `position` (epoch, offset) is its whole state."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self.seek((0, 0))

    @property
    def position(self) -> tuple[int, int]:
        return self._epoch, self._offset

    def seek(self, position: tuple[int, int]) -> None:
        self._epoch, self._offset = position
        self._ids = self._store.shuffled(self._epoch)

    def next_batch(self, num_windows: int, window_tokens: int) -> np.ndarray:
        """Return int64 [num_windows, window_tokens]. An epoch's last incomplete batch is dropped."""
        size = num_windows * window_tokens
        if self._offset + size > len(self._ids):
            self.seek((self._epoch + 1, 0))
        batch = self._ids[self._offset : self._offset + size]
        self._offset += size
        return batch.astype(np.int64).reshape(num_windows, window_tokens)
