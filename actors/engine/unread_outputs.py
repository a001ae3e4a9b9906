"""Unread outputs of a stream: merged while the reader is slow, and bounded.

A reader that keeps up gets one output for each step that produced tokens. When many are unread, those of a
completion are merged (text, tokens, log probabilities), so that their memory is about that of their content.
`ReaderLimit` bounds the bytes of all streams of a client together. Used by `output_streams.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from .output_logprobs import OutputLogprobs
from .output_processor import CompletionOutput, RequestOutput, RequestTracker

KEPT_APART = 16  # outputs that are not merged; at least two per completion
MERGED_TOKENS = 128  # per merged output, so that writing one takes the event loop at most one time slice
ENTRY_BYTES, TOKEN_BYTES = 512, 8
PLACE_BYTES, TOP_BYTES = 150, 72  # bytes of log probabilities per position, and per top token at a position


@dataclass(slots=True)
class ReaderLimit:
    """Bounds what the client of one HTTP request may leave unread in all of its streams together.

    Attributes:
        client_id: the client's name for the request.
        max_bytes: limit, in approximate bytes of memory.
        num_bytes: bytes that are unread now.
        is_logged: whether exceeding the limit has been logged.
    """

    client_id: str
    max_bytes: int
    num_bytes: int = 0
    is_logged: bool = False

    @property
    def is_exceeded(self) -> bool:
        return self.num_bytes > self.max_bytes


@dataclass(slots=True)
class _Entry:
    output: CompletionOutput
    num_bytes: int


@dataclass(slots=True)
class Unread:
    """Unread outputs of one stream, oldest first.

    Attributes:
        tracker: tracker of the stream's request.
        limit: limit of its client; None if the reader cannot be slow.
    """

    tracker: RequestTracker
    limit: ReaderLimit | None = None
    _entries: deque[_Entry] = field(default_factory=deque[_Entry])
    _last: dict[int, _Entry] = field(default_factory=dict[int, _Entry])  # newest entry by completion

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, fresh: CompletionOutput) -> None:
        num_bytes = size_of(fresh)
        last = self._last.get(fresh.index) if self._is_behind else None
        if last is not None and len(last.output.token_ids) + len(fresh.token_ids) <= MERGED_TOKENS:
            last.output, last.num_bytes = _merged(last.output, fresh), last.num_bytes + num_bytes
        else:
            num_bytes += ENTRY_BYTES
            entry = self._last[fresh.index] = _Entry(fresh, num_bytes)
            self._entries.append(entry)
        if self.limit is not None:
            self.limit.num_bytes += num_bytes

    def take(self) -> RequestOutput:
        """Remove and return the oldest output; it is marked as finished only if no other is left."""
        entry = self._entries.popleft()
        if self._last.get(entry.output.index) is entry:
            del self._last[entry.output.index]
        if self.limit is not None:
            self.limit.num_bytes -= entry.num_bytes
        output = self.tracker.output([entry.output])
        return replace(output, finished=False) if self._entries and output.finished else output

    def clear(self) -> None:
        """Drop all outputs. Their bytes stay counted, so the client's other streams end too."""
        self._entries.clear()
        self._last.clear()

    @property
    def _is_behind(self) -> bool:
        return len(self._entries) >= max(KEPT_APART, 2 * self.tracker.num_completions)


def _merged(before: CompletionOutput, fresh: CompletionOutput) -> CompletionOutput:
    logprobs = before.logprobs
    if logprobs is not None and fresh.logprobs is not None:
        logprobs = OutputLogprobs.joined(logprobs, fresh.logprobs)
    return CompletionOutput(
        before.index,
        before.text + fresh.text,
        [*before.token_ids, *fresh.token_ids],
        fresh.finish_reason,
        fresh.stop_reason,
        logprobs,
    )


def size_of(output: CompletionOutput) -> int:
    """Return the approximate memory of an output, in bytes."""
    num_bytes = len(output.text) + TOKEN_BYTES * len(output.token_ids)
    if output.logprobs:
        places = output.logprobs.numbers
        num_bytes += len(places) * (PLACE_BYTES + TOP_BYTES * len(places[0][3]))
    return num_bytes
