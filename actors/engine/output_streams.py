"""The output streams of an engine's requests, one for each request, fed with the results of steps.

Updates of a step are delivered in slices, so that hundreds of requests do not block other tasks. A reader
that keeps up gets one output for each step that produced tokens. When many are unread, those of a completion
are merged, so that they take about the memory of their content. `ReaderLimit` bounds the bytes of all streams
of a client together. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...cluster.engine.engine_core import SequenceUpdate
from ...cluster.errors import (
    ENDINGS,
    MantaError,
    NotANumberError,
    OutputProcessingError,
    RequestError,
    SlowReaderError,
    brief,
)
from ...cluster.request.request import FinishReason
from ..system import event_loop
from .output_processor import OutputProcessor, RequestTracker
from .outputs import CompletionOutput, OutputLogprobs, RequestOutput

logger = logging.getLogger(__name__)

TOO_SLOW = (
    "This stream was ended, because its client left more than {} bytes of it unread (max_unread_bytes). "
    "Read faster, or request less at a time."
)

MAX_UNMERGED = 16  # outputs that are not merged; at least two per completion
MERGED_TOKENS = 128  # per merged output, so that writing one takes the event loop at most one time slice
ENTRY_BYTES, TOKEN_BYTES = 512, 8
PLACE_BYTES, TOP_BYTES = 150, 72  # bytes of log probabilities per position, and per top token at a position


@dataclass(slots=True)
class OutputStream:
    """The outputs of one user request on their way to its reader. `failure` ends the stream."""

    tracker: RequestTracker
    background: bool = False
    complete_only: bool = False  # the reader wants only the complete output; it gets nothing earlier
    # bounds what the client may leave unread; None if the reader cannot be slow
    limit: ReaderLimit | None = None
    failure: MantaError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    client_id: str | None = None  # the client's name for the request, for the log
    unread: UnreadOutputs = field(init=False)

    def __post_init__(self) -> None:
        self.unread = UnreadOutputs(self.tracker, self.limit)

    async def next(self) -> RequestOutput | None:
        while not self.unread.entries:
            if self.failure is not None:
                raise self.failure
            if self.tracker.finished:
                return None
            await self.wake.wait()
            self.wake.clear()
        return self.unread.take()

    def add(self, fresh: CompletionOutput) -> None:
        if not self.complete_only:
            self.unread.add(fresh)
            # A reader with a limit assembles the output itself.
            if self.limit is not None and fresh.logprobs is not None:
                self.tracker.forget_logprobs(fresh.index)
        elif not self.tracker.finished:
            return
        self.wake.set()

    def fail(self, failure: MantaError) -> None:
        """End the request with `failure` unless it has finished."""
        if not self.tracker.finished:
            self.fail_incomplete(failure)

    def fail_incomplete(self, failure: MantaError) -> None:
        """End the request with `failure` even if its last tokens have arrived: the output is incomplete."""
        self.failure = failure
        self.wake.set()

    @property
    def is_too_slow(self) -> bool:
        limit = self.limit
        return limit is not None and limit.num_bytes > limit.max_bytes and not self.tracker.finished


class OutputStreams:
    """The streams of one engine, by user request id. `abort` ends completions in the engine."""

    def __init__(self, abort: Callable[[Sequence[str], FinishReason], None]) -> None:
        self.processor = OutputProcessor(None)
        self._abort = abort
        self._open: dict[str, OutputStream] = {}
        self._updates: deque[SequenceUpdate] = deque()  # not delivered yet
        self._is_delivering = False  # a call of `_deliver_slice` is scheduled on the event loop
        self._num_handed_out = self._num_at_last_poll = 0

    @property
    def ids(self) -> list[str]:
        return sorted(self._open)

    def check_new(self, request_id: str) -> None:
        if request_id in self._open:
            raise RequestError(
                f"request_id={brief(request_id)} is already running; give each request a unique id.",
                param="request_id",
            )

    def register(self, stream: OutputStream) -> None:
        self._open[stream.tracker.request_id] = stream

    def remove(self, stream: OutputStream) -> None:
        """Remove a stream after its reader has left; abort the request if it has not finished."""
        tracker = stream.tracker
        del self._open[tracker.request_id]
        if not tracker.finished:
            self.processor.forget(tracker.child_ids)
            self._abort(tracker.child_ids, "abort")

    def abort(self, request_id: str) -> bool:
        stream = self._open.get(request_id)
        if stream is None:
            return False
        child_ids = stream.tracker.child_ids
        self._abort(child_ids, "abort")
        self.deliver([_aborted(child_id) for child_id in child_ids])
        return True

    def deliver(self, updates: Sequence[SequenceUpdate]) -> None:
        self._updates.extend(updates)
        if not self._is_delivering:
            self._deliver_slice()

    def is_stuck(self) -> bool:
        """Return whether updates are pending and none was delivered since the last call."""
        moved, self._num_at_last_poll = self._num_handed_out - self._num_at_last_poll, self._num_handed_out
        return bool(self._updates) and not moved

    def fail_all(self, failure: MantaError) -> None:
        """Deliver all pending updates, then end every stream with `failure`."""
        while self._updates:
            self._deliver_update(self._updates.popleft())
        for stream in self._open.values():
            stream.fail(failure)

    def fail_online(self, failure: MantaError) -> None:
        for stream in self._open.values():
            if not stream.background:
                stream.fail(failure)

    def _deliver_slice(self) -> None:
        self._is_delivering = False
        end_s = time.monotonic() + event_loop.TIME_SLICE_S
        try:
            while self._updates:
                self._deliver_update(self._updates.popleft())
                if time.monotonic() >= end_s:
                    break
        finally:
            if self._updates:
                asyncio.get_running_loop().call_soon(self._deliver_slice)
                self._is_delivering = True

    def _deliver_update(self, update: SequenceUpdate) -> None:
        """Deliver one update. An exception ends its request and no other."""
        self._num_handed_out += 1
        tracker = self.processor.tracker_of(update.request_id)
        if tracker is None:
            return
        try:
            if (fed := self.processor.feed(update)) is None:
                return
            _, fresh, stopped = fed
            stream = self._open[tracker.request_id]
            stream.add(fresh)
        except ENDINGS:
            raise
        except BaseException as error:
            self._end_failed(tracker, error)
            return
        if stopped:
            self._abort([update.request_id], "stop")
        if stream.is_too_slow:
            self._cut_off(stream)

    def _cut_off(self, stream: OutputStream) -> None:
        """End an unread stream; its slots and pages are free before the next plan."""
        limit, tracker = stream.limit, stream.tracker
        assert limit is not None, "it has been exceeded"
        if not limit.is_logged:
            limit.is_logged = True
            logger.warning(
                "request %s is ended: its client has left more than %d bytes unread (max_unread_bytes)",
                *(limit.client_id, limit.max_bytes),
                extra={"request_id": limit.client_id},
            )
        stream.unread.clear()
        stream.fail(SlowReaderError(TOO_SLOW.format(limit.max_bytes), param="max_unread_bytes"))
        self.processor.forget(tracker.child_ids)
        self._abort(tracker.child_ids, "abort")

    def _end_failed(self, tracker: RequestTracker, error: BaseException) -> None:
        stream = self._open[tracker.request_id]
        stream.fail_incomplete(processing_failure(tracker.request_id, error, client_id=stream.client_id))
        self.processor.forget(tracker.child_ids)
        self._abort(tracker.child_ids, "error")


def processing_failure(request_id: str, error: BaseException, *, client_id: str | None = None) -> MantaError:
    """Log an exception from processing a request's output; return the error that ends it."""
    name = client_id or request_id
    if isinstance(error, NotANumberError):
        logger.error("request %s: %s", name, error.message, extra={"request_id": name})
        return error
    message = "request %s: its answer could not be made of its tokens"
    logger.error(message, name, exc_info=error, extra={"request_id": name})
    return OutputProcessingError(
        f"The answer could not be made of its tokens ({type(error).__name__}). The log of the process that "
        f"served it has the cause under the request's id, {brief(name)}."
    )


def _aborted(child_id: str) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=child_id,
        token_ids=(),
        finish_reason="abort",
        stop_reason=None,
        num_cached_tokens=0,
        num_drafted=0,
        num_accepted=0,
    )


@dataclass(slots=True)
class ReaderLimit:
    """Bounds what the client of one HTTP request may leave unread in all of its streams."""

    client_id: str  # the client's name for the request
    max_bytes: int  # limit, in approximate bytes of memory
    num_bytes: int = 0  # bytes that are unread now
    is_logged: bool = False  # whether exceeding the limit has been logged


@dataclass(slots=True)
class _Entry:
    output: CompletionOutput
    num_bytes: int


@dataclass(slots=True)
class UnreadOutputs:
    tracker: RequestTracker  # tracker of the stream's request
    limit: ReaderLimit | None = None  # limit of its client; None if the reader cannot be slow
    entries: deque[_Entry] = field(default_factory=deque[_Entry])
    _last: dict[int, _Entry] = field(default_factory=dict[int, _Entry])  # newest entry by completion

    def add(self, fresh: CompletionOutput) -> None:
        num_bytes = size_of(fresh)
        is_slow = len(self.entries) >= max(MAX_UNMERGED, 2 * self.tracker.num_completions)
        last = self._last.get(fresh.index) if is_slow else None
        if last is not None and len(last.output.token_ids) + len(fresh.token_ids) <= MERGED_TOKENS:
            last.output, last.num_bytes = _merged(last.output, fresh), last.num_bytes + num_bytes
        else:
            num_bytes += ENTRY_BYTES
            entry = self._last[fresh.index] = _Entry(fresh, num_bytes)
            self.entries.append(entry)
        if self.limit is not None:
            self.limit.num_bytes += num_bytes

    def take(self) -> RequestOutput:
        """Remove the oldest output, marked as finished only if no other is left."""
        entry = self.entries.popleft()
        if self._last.get(entry.output.index) is entry:
            del self._last[entry.output.index]
        if self.limit is not None:
            self.limit.num_bytes -= entry.num_bytes
        output = self.tracker.output([entry.output])
        return replace(output, finished=False) if self.entries and output.finished else output

    def clear(self) -> None:
        """Drop all outputs. Their bytes stay counted, so the client's other streams end too."""
        self.entries.clear()
        self._last.clear()


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
    """Return the approximate bytes of an output in memory."""
    num_bytes = len(output.text) + TOKEN_BYTES * len(output.token_ids)
    if output.logprobs:
        places = output.logprobs.numbers
        num_bytes += len(places) * (PLACE_BYTES + TOP_BYTES * len(places[0][3]))
    return num_bytes
