"""What a stream has brought and its reader has not taken: merged while the reader is behind, and bounded.

A reader that keeps up gets one output for each step that brought tokens. When many are unread, those of a
completion are merged (text, tokens, log probabilities), so that they hold about as much memory as what they
say. A client's streams together may hold so many bytes (`ReaderLimit`). Used by `output_streams.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from .output_logprobs import OutputLogprobs
from .output_processor import CompletionOutput, RequestOutput, RequestTracker

KEPT_APART = 16  # outputs that are not merged; in any case two of each completion
MERGED_TOKENS = 128  # of an output; to write one of them takes the event loop no longer than a turn
ENTRY_BYTES, TOKEN_BYTES = 512, 8
PLACE_BYTES, TOP_BYTES = 150, 72  # of a place's log probabilities, and of each likeliest token in it


@dataclass(slots=True)
class ReaderLimit:
    """Bounds what one client, of one HTTP request, may leave unread in all of its streams together.

    Attributes:
        client_id: the request, as its client knows it.
        max_bytes: of memory, about.
        num_bytes: that are unread now.
        is_logged: whether the log says that they are too many.
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
    """Outputs of one stream, oldest first.

    Attributes:
        tracker: of the stream's request.
        limit: of its client; None where nobody can be slow.
    """

    tracker: RequestTracker
    limit: ReaderLimit | None = None
    _entries: deque[_Entry] = field(default_factory=deque[_Entry])
    _last: dict[int, _Entry] = field(default_factory=dict[int, _Entry])  # by completion

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
        """Remove and return the oldest; the request is finished for its reader when none is left."""
        entry = self._entries.popleft()
        if self._last.get(entry.output.index) is entry:
            del self._last[entry.output.index]
        if self.limit is not None:
            self.limit.num_bytes -= entry.num_bytes
        output = self.tracker.output([entry.output])
        return replace(output, finished=False) if self._entries and output.finished else output

    def clear(self) -> None:
        """Drop all. What they held stays counted: the client's other streams end, too."""
        self._entries.clear()
        self._last.clear()

    @property
    def _is_behind(self) -> bool:
        return len(self._entries) >= max(KEPT_APART, 2 * self.tracker.num_completions)


def _merged(before: CompletionOutput, fresh: CompletionOutput) -> CompletionOutput:
    """Two outputs of a completion as one."""
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
    """Return the memory of what an output says, about, in bytes."""
    num_bytes = len(output.text) + TOKEN_BYTES * len(output.token_ids)
    if output.logprobs:
        places = output.logprobs.numbers
        num_bytes += len(places) * (PLACE_BYTES + TOP_BYTES * len(places[0][3]))
    return num_bytes
