"""A target's connection to its drafter, on which no wait is unbounded and every step can do without drafts.

The drafter may die, stop or lag at any moment, which only costs drafts. A step waits no longer than recent
drafts explain; after that the target verifies without them, and the drafter *lags*: it still gets all
messages, so that it can catch up, but no step waits for it. A drafter that lags by too many steps, refuses or
dies is *lost*: another connection must be made. Used on target rank 0; does not use Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ....cluster.errors import MantaError
from ....cluster.step.scheduler_output import DrafterUse, IntArray, SchedulerOutput
from ..shm import abstract_sockets
from ..shm.endpoint import PeerLostError, ShmEndpoint, SpinWaiter, no_op
from ..shm.ring_buffer import SharedMemory, ShmRing
from ..shm.tensor_mailbox import Kinds, Mailbox, RoundRobinBuffer, size_of
from .drafter_protocol import (
    LAYOUT,
    MAX_OPEN,
    NUM_PLACES,
    Drafted,
    DrafterRefusal,
    DraftRequest,
    Hello,
    StepReport,
    StepReportDone,
    Welcome,
)

logger = logging.getLogger(__name__)

# A step waits at most this multiple of the slowest recent draft's time, within these bounds.
SLACK = 8.0
MIN_WAIT_S, MAX_WAIT_S = 0.25, 2.0
_SEND_TIMEOUT_S = 1.0  # for a full ring although the drafter keeps up: a long prompt is being sent
_NUM_RECENT = 32


@dataclass(slots=True)
class _Step:
    place: int  # index of its drafts in the mailbox
    since_s: float  # earliest time at which it could be drafted
    drafts: bool  # whether drafts are expected
    is_drafted: bool = False
    is_over: bool = False  # all results were sent
    num_reported: int = 0  # results that were sent and are not yet acknowledged


@dataclass(slots=True)
class _Unsent:
    """A message to send once the device has written its data; built with the time of sending."""

    message: Callable[[float], StepReport]
    written: torch.cuda.Event | None


class DrafterClient(ShmEndpoint):
    """A connection to one session of one drafter, from the target's side. Raises PeerLostError.

    Args:
        address: address of the drafter's listener.
        hello: identifies the engine; its `mailbox` is filled in here.
        waiter: shared by everything that the target's process waits for.
    """

    def __init__(self, address: str, hello: Hello, device: torch.device, waiter: SpinWaiter) -> None:
        sock, proof = abstract_sockets.connect(address)
        rings = os.memfd_create("manta-drafter")
        os.ftruncate(rings, LAYOUT.size_bytes)
        sizes = hello.sizes
        self._mailbox, ticket = Mailbox.make(sizes.total_bytes, device)
        files = [rings, ticket] if isinstance(ticket, int) else [rings]
        hello = hello if isinstance(ticket, int) else replace(hello, mailbox=ticket)
        try:
            socket.send_fds(sock, [pickle.dumps(hello, protocol=5)], files)
        except OSError:
            sock.close()
            raise PeerLostError("the drafter") from None
        memory = SharedMemory(rings, LAYOUT.size_bytes)
        for file in files:
            os.close(file)
        super().__init__(memory, 0, waiter)
        self._down, self._up = ShmRing.down(memory, LAYOUT), ShmRing.up(memory, LAYOUT, 0)
        # the drafter sends it as soon as it accepts the connection
        self._add_peer(0, sock, LAYOUT.line(0, 0), proof)
        self._sizes, self._on_gpu = sizes, device.type == "cuda"
        self._results_buffer = RoundRobinBuffer(sizes.results_offset, sizes.results_bytes)
        self._steps: dict[int, _Step] = {}
        self._unsent: deque[_Unsent] = deque()
        self._num_plans = 0
        self._draft_times_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._use = DrafterUse()
        self._is_accepted = self._lags = False
        self._why_lost: str | None = None
        self.refusal: MantaError | None = None

    # State.

    @property
    def is_lost(self) -> bool:
        return self._why_lost is not None

    @property
    def is_ready(self) -> bool:
        """Whether the drafter has accepted and does not lag."""
        return self._is_accepted and not self._lags and not self.is_lost

    @property
    def num_open(self) -> int:
        """Number of steps that the drafter has not completed."""
        return len(self._steps)

    def take_use(self) -> DrafterUse:
        """Return the drafter's queueing and working time since the last call."""
        use, self._use = self._use, DrafterUse()
        return use

    def wait_for_welcome(self, timeout_s: float) -> None:
        """Wait at start for the drafter's answer. Raises its refusal, TimeoutError, PeerLostError."""
        self._waiter.wait(lambda: self.receive() or self._is_accepted or self.is_lost, timeout_s)
        if self.refusal is not None:
            raise self.refusal
        if self.is_lost:
            raise PeerLostError(self._why_lost)

    def receive(self) -> None:
        """Handle the drafter's messages, and send those with data that the device has written."""
        if self.is_lost:
            return
        # In their order, up to the first whose data the device is still writing.
        while self._unsent and (self._unsent[0].written is None or self._unsent[0].written.query()):
            self._send(self._unsent.popleft().message(time.monotonic()))
            if self.is_lost:
                return
        if self._proofs:
            self.take_wakeups()  # reads the proof that the peer is what it claims to be
        # Messages are pickles: none is read before that proof.
        while not self._proofs and self._up.has_next(0):
            self._handle(self._read(self._up, 0, _SEND_TIMEOUT_S, no_op))
            if self.is_lost:
                return
        if self._lost:  # its socket has closed
            self._mark_lost("it died")
        # It has caught up once it has acknowledged all results.
        elif self._lags and not any(step.num_reported for step in self._steps.values()):
            self._lags = False
            logger.info("the drafter has caught up")

    # Steps.

    def request_drafts(self, plan: SchedulerOutput, *, has_grammars: bool = False) -> None:
        """Request drafts for a plan, before anything else of the step; see `DraftRequest`."""
        self.receive()
        if len(self._steps) >= MAX_OPEN:
            self._mark_lost(f"it lags by {MAX_OPEN} steps")
        if self.is_lost:
            return
        place, now_s = self._num_plans % NUM_PLACES, time.monotonic()
        self._num_plans += 1
        self._steps[plan.step] = _Step(place, now_s, plan.num_draft_tokens > 0)
        self._send(DraftRequest(plan, place, has_grammars, now_s))

    def is_answered(self, step: int) -> bool:
        """Return whether `drafts` would return for this step without waiting."""
        self.receive()
        open_step = self._steps.get(step)
        if open_step is None or not open_step.drafts or open_step.is_drafted or not self.is_ready:
            return True
        return time.monotonic() > open_step.since_s + self.max_wait_s

    def wait_for_drafts(self, step: int) -> None:
        """Wait until the step's drafts have arrived or are late."""
        with contextlib.suppress(TimeoutError):
            self._waiter.wait(lambda: self.is_answered(step), MAX_WAIT_S, poll_s=5e-3)

    def drafts(self, step: int, kinds: Kinds) -> Sequence[Tensor] | None:
        """Return drafts or trees, margins and candidates, valid until `send_results`; None if late."""
        self.wait_for_drafts(step)
        open_step = self._steps.get(step)
        if open_step is None or self.is_lost:
            return None
        if open_step.is_drafted:
            return self._mailbox.views(open_step.place * self._sizes.drafts_bytes, kinds)
        if self.is_ready:
            self._lags = True
            logger.warning("the drafter lags: no drafts within %.2f s", self.max_wait_s)
        return None

    def send_results(
        self,
        step: int,
        part: int,
        values: Sequence[Tensor],
        *,
        followed: bool,
        num_drafts: IntArray | None,
        is_last: bool,
    ) -> None:
        """Send the results of one part of a step's rows.

        Args:
            followed: whether the drafts of `drafts` were verified.
            num_drafts: verified drafts per request; None if as planned, or if they are among the values.
        """
        open_step = self._steps.get(step)
        if open_step is None or self.is_lost:
            return
        kinds = [(tuple(value.shape), value.dtype) for value in values]
        offset = self._results_buffer.take(size_of(kinds))
        if offset is None:
            self._mark_lost("it lags, and unread results have filled the mailbox")
            return
        for view, value in zip(self._mailbox.views(offset, kinds), values, strict=True):
            view.copy_(value)
        open_step.num_reported += 1
        open_step.is_over = open_step.is_over or is_last
        written = None
        if self._on_gpu:
            written = torch.cuda.Event()
            written.record()
        self._unsent.append(_Unsent(partial(StepReport, step, part, offset, followed, num_drafts), written))
        for other in self._steps.values():
            other.since_s = max(other.since_s, time.monotonic())
        self.receive()

    @property
    def max_wait_s(self) -> float:
        """Seconds for which drafts are waited for."""
        slowest_s = max(self._draft_times_s, default=MAX_WAIT_S)
        return min(max(SLACK * slowest_s, MIN_WAIT_S), MAX_WAIT_S)

    def _handle(self, message: object) -> None:
        match message:
            case Welcome():
                self._is_accepted = True
            case DrafterRefusal(error):
                self.refusal = error
                self._mark_lost(error.message)
            case Drafted(step, at_s, use):
                self._use += use
                open_step = self._steps[step]
                open_step.is_drafted = True
                self._draft_times_s.append(max(at_s - open_step.since_s, 0.0))
            case StepReportDone(step, _, use):
                self._use += use
                open_step = self._steps[step]
                open_step.num_reported -= 1
                self._results_buffer.release()
                if open_step.is_over and not open_step.num_reported:
                    del self._steps[step]
            case _:
                raise AssertionError(f"unexpected message {message!r}")

    def _send(self, message: object) -> None:
        try:
            self._write(self._down, message, 0.0 if self._lags else _SEND_TIMEOUT_S, no_op)
        except TimeoutError:
            self._mark_lost("it does not read its messages")
        except PeerLostError:
            self._mark_lost("it died")

    def _mark_lost(self, reason: str) -> None:
        if self._why_lost is None:
            self._why_lost = reason
            logger.warning("the drafter is lost: %s", reason)
            self.close()
