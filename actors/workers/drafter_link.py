"""A target's way to its drafter: asks, waits within bounds, tells, and can do without.

The drafter may die, stop or lag at any moment, and costs drafts alone. Nothing here waits for it longer than
its drafts took lately would explain: after that the target verifies what it likes, and the drafter *lags*: it
is told everything still, so that it may catch up and be asked again, but nobody waits for it. One that lags
for too many steps, refuses or dies is *lost*: the link is over, and another has to be made. What is said is
in `link_messages.py`. Used by `split_drafter.py`, on target rank 0; no Ray in here.
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

from ...cluster.errors import MantaError
from ...cluster.plan import DrafterUse, IntArray, SchedulerOutput
from . import doors
from .ends import End, PeerLostError, Waiter, nothing
from .link_messages import LAYOUT, MAX_OPEN, Ask, Done, Drafted, Hello, Refusal, Told, Welcome
from .mailbox import Mailbox, Rounds, padded
from .rings import Ring, SharedMemory

logger = logging.getLogger(__name__)

# A step may wait so many times as long as the slowest of the last drafts took, within these bounds.
SLACK = 8.0
LEAST_WAIT_S, MOST_WAIT_S = 0.25, 2.0
_SAY_WITHIN_S = 1.0  # for a ring that is full though the drafter keeps up: a long prompt on its way
_REMEMBERED = 32


@dataclass(slots=True)
class _Step:
    """One that the drafter has not done with.

    Attributes:
        place: of its drafts.
        since_s: it could have been drafted since.
        drafts: whether any are expected.
        num_told: parts that were told and are not done.
    """

    place: int
    since_s: float
    drafts: bool
    is_drafted: bool = False
    is_over: bool = False  # all parts were told
    num_told: int = 0


@dataclass(slots=True)
class _Unsaid:
    """What may be said when the device has written it; the message takes when that is, in seconds."""

    message: Callable[[float], Told]
    written: torch.cuda.Event | None


class DrafterLink(End):
    """One seat at one drafter, from the target's side.

    Args:
        address: of the drafter's door.
        hello: who asks; its `mailbox` is filled in here.
        device: of the target.
        waiter: of all that the target's process waits for.

    Raises:
        PeerLostError: there is no drafter of that address.
    """

    def __init__(self, address: str, hello: Hello, device: torch.device, waiter: Waiter) -> None:
        sock, proof = doors.knock(address)
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
        self._down, self._up = Ring.down(memory, LAYOUT), Ring.up(memory, LAYOUT, 0)
        self._meet(0, sock, LAYOUT.line(0, 0), proof)  # which comes when the drafter has a moment
        self._sizes, self._on_gpu = sizes, device.type == "cuda"
        self._told = Rounds(sizes.told_at, sizes.told_bytes)
        self._steps: dict[int, _Step] = {}
        self._unsaid: deque[_Unsaid] = deque()
        self._num_asked = 0
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._use = DrafterUse()
        self._is_welcome = self._lags = False
        self._why_lost: str | None = None
        self.refusal: MantaError | None = None

    # How it is.

    @property
    def is_lost(self) -> bool:
        return self._why_lost is not None

    @property
    def is_ready(self) -> bool:
        """Whether drafts may be asked for: it is there, and has caught up."""
        return self._is_welcome and not self._lags and not self.is_lost

    @property
    def num_open(self) -> int:
        """Steps that the drafter has not done with."""
        return len(self._steps)

    def take_use(self) -> DrafterUse:
        """What the drafter told of its queue and its time since this was asked last."""
        use, self._use = self._use, DrafterUse()
        return use

    def wait_for_welcome(self, timeout_s: float) -> None:
        """At start, when there is time. Raises the drafter's own refusal, TimeoutError, PeerLostError."""
        self._waiter.wait(lambda: self.hear() or self._is_welcome or self.is_lost, timeout_s)
        if self.refusal is not None:
            raise self.refusal
        if self.is_lost:
            raise PeerLostError(self._why_lost)

    def hear(self) -> None:
        """Take in what the drafter said, and say what the device has written meanwhile."""
        if self.is_lost:
            return
        while self._unsaid and (self._unsaid[0].written is None or self._unsaid[0].written.query()):
            self._say(self._unsaid.popleft().message(time.monotonic()))
            if self.is_lost:
                return
        if self._proofs:
            self.take_wakeups()
        while not self._proofs and self._up.has_next(0):
            self._take(self._read(self._up, 0, _SAY_WITHIN_S, nothing))
            if self.is_lost:
                return
        if self._lost:
            self._lose("it has died")
        elif self._lags and not any(step.num_told for step in self._steps.values()):
            self._lags = False
            logger.info("the drafter has caught up")

    # A step.

    def ask(self, plan: SchedulerOutput) -> None:
        """Have this plan drafted; comes before anything else of the step."""
        self.hear()
        if len(self._steps) >= MAX_OPEN:
            self._lose(f"it lags by {MAX_OPEN} steps")
        if self.is_lost:
            return
        place, now_s = self._num_asked % MAX_OPEN, time.monotonic()
        self._num_asked += 1
        self._steps[plan.step] = _Step(place, now_s, plan.num_draft_tokens > 0)
        self._say(Ask(plan, place, now_s))

    def is_answered(self, step: int) -> bool:
        """Whether `drafts` of this step would not wait."""
        self.hear()
        asked = self._steps.get(step)
        if asked is None or not asked.drafts or asked.is_drafted or not self.is_ready:
            return True
        return time.monotonic() > asked.since_s + self.patience_s

    def drafts(self, step: int, shape: tuple[int, ...]) -> Sequence[Tensor] | None:
        """Proposals of that shape, int64, and their margins, fp32, in memory that stays as it is until the
        step is told; None if there are none in time."""
        with contextlib.suppress(TimeoutError):
            self._waiter.wait(lambda: self.is_answered(step), MOST_WAIT_S, poll_s=5e-3)
        asked = self._steps.get(step)
        if asked is None or self.is_lost:
            return None
        if asked.is_drafted:
            kinds = [(shape, torch.int64), (shape, torch.float32)]
            return self._mailbox.views(asked.place * self._sizes.drafts_bytes, kinds)
        if self.is_ready:
            self._lags = True
            logger.warning("the drafter lags: no drafts within %.2f s", self.patience_s)
        return None

    def tell(
        self,
        step: int,
        part: int,
        values: Sequence[Tensor],
        *,
        followed: bool,
        num_drafts: IntArray | None,
        is_last: bool,
    ) -> None:
        """What a part of a step's rows brought.

        Args:
            followed: whether what `drafts` gave was verified.
            num_drafts: of each request, that were verified; None: as planned, or told among the values.
            is_last: of the step's parts.
        """
        asked = self._steps.get(step)
        if asked is None or self.is_lost:
            return
        kinds = [(tuple(value.shape), value.dtype) for value in values]
        offset = self._told.take(sum(padded(value.numel() * value.element_size()) for value in values))
        if offset is None:
            self._lose("it lags, and what it has not taken in leaves no room")
            return
        for view, value in zip(self._mailbox.views(offset, kinds), values, strict=True):
            view.copy_(value)
        asked.num_told += 1
        asked.is_over = asked.is_over or is_last
        written = None
        if self._on_gpu:
            written = torch.cuda.Event()
            written.record()
        self._unsaid.append(_Unsaid(partial(Told, step, part, offset, followed, num_drafts), written))
        for other in self._steps.values():
            other.since_s = max(other.since_s, time.monotonic())
        self.hear()

    @property
    def patience_s(self) -> float:
        """How long drafts are waited for."""
        slowest_s = max(self._took_s, default=MOST_WAIT_S)
        return min(max(SLACK * slowest_s, LEAST_WAIT_S), MOST_WAIT_S)

    def _take(self, message: object) -> None:
        match message:
            case Welcome():
                self._is_welcome = True
            case Refusal(error):
                self.refusal = error
                self._lose(error.message)
            case Drafted(step, at_s, use):
                self._use += use
                asked = self._steps[step]
                asked.is_drafted = True
                self._took_s.append(max(at_s - asked.since_s, 0.0))
            case Done(step, _, use):
                self._use += use
                asked = self._steps[step]
                asked.num_told -= 1
                self._told.give_back()
                if asked.is_over and not asked.num_told:
                    del self._steps[step]
            case _:
                raise AssertionError(f"a drafter does not say {message!r}")

    def _say(self, message: object) -> None:
        try:
            self._write(self._down, message, 0.0 if self._lags else _SAY_WITHIN_S, nothing)
        except TimeoutError:
            self._lose("it does not read what it is told")
        except PeerLostError:
            self._lose("it has died")

    def _lose(self, why: str) -> None:
        if self._why_lost is None:
            self._why_lost = why
            logger.warning("the drafter is lost: %s", why)
            self.close()
