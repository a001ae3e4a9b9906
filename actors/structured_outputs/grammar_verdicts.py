"""What is known about grammars that were requested before: accepted, or why not. Thread-safe.

A verdict is found by the request's own fields, before its grammar is written, so a repeated request waits for
no compilation.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

import orjson

from ...cluster.errors import RequestError
from ...cluster.request.request import SamplingParams
from ...cluster.request.structured_outputs import Grammar

MAX_VERDICTS = 256
MAX_CHARS = 16 << 20  # of their grammars together


@dataclass(frozen=True, slots=True)
class GrammarVerdict:
    """`refusal`: message and field, for a grammar that was refused. `cpu_s`: time to compile another."""

    grammar: Grammar | None = None
    refusal: tuple[str, str | None] | None = None
    cpu_s: float = 0.0

    def accepted(self) -> Grammar:
        """Return the grammar. Raises RequestError if it was refused."""
        if self.refusal is not None:
            message, param = self.refusal
            raise RequestError(message, param=param)
        assert self.grammar is not None, "a verdict is a grammar or a refusal"
        return self.grammar

    @property
    def num_chars(self) -> int:
        return 0 if self.grammar is None else len(self.grammar.text)


class VerdictCache:
    """The most recently used verdicts, by `digest_of`."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def get(self, digest: bytes | None) -> GrammarVerdict | None:
        with self._lock:
            verdict = None if digest is None else self._verdicts.get(digest)
            if digest is not None and verdict is not None:
                self._verdicts.move_to_end(digest)
            return verdict

    def put(self, digest: bytes | None, verdict: GrammarVerdict) -> None:
        if digest is None:
            return
        with self._lock:
            replaced = self._verdicts.pop(digest, None)
            self._num_chars += verdict.num_chars - (0 if replaced is None else replaced.num_chars)
            self._verdicts[digest] = verdict
            while len(self._verdicts) > MAX_VERDICTS or self._num_chars > MAX_CHARS:
                _, oldest = self._verdicts.popitem(last=False)
                self._num_chars -= oldest.num_chars


def digest_of(params: SamplingParams) -> bytes | None:
    """Return a digest of all that decides on a request's grammar; None if it cannot be written as JSON."""
    requested = (
        params.structured_outputs,
        params.grammar,
        params.allowed_token_ids,
        [word for word in params.bad_words_token_ids if len(word) == 1],
    )
    try:
        return hashlib.sha256(orjson.dumps(requested)).digest()
    except orjson.JSONEncodeError:  # more than 254 levels, integers of more than 64 bits, lone surrogates
        return None
