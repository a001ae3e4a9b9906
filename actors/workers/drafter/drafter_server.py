"""A drafter as a server with one session per engine, served one at a time.

Each engine (a *guest*) has a connection, a seat of its own (`drafter_session.py`) and a place in a fair
queue: of those with work, the guest that has used the least of the drafter's time is next. A guest's seat is
freed when it leaves, and no guest can keep another one waiting. The messages are those of
`drafter_protocol.py`, the other side is `drafter_client.py`. Run by `drafter_worker.py`; does not use Ray.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ....cluster.errors import EngineDeadError, MantaError
from ....cluster.step.scheduler_output import DrafterUse, SchedulerOutput
from ..shm import abstract_sockets as doors
from ..shm.endpoint import PeerLostError, ShmEndpoint, SpinWaiter, nothing, spin_budget_s
from ..shm.ring_buffer import SharedMemory, ShmRing
from ..shm.tensor_mailbox import Mailbox
from .drafter_protocol import (
    LAYOUT,
    Drafted,
    DrafterRefusal,
    DraftRequest,
    Hello,
    StepReport,
    StepReportDone,
    Welcome,
)
from .drafter_session import DrafterSession

logger = logging.getLogger(__name__)

_HELLO_BYTES, _HELLO_WITHIN_S = 256 * 1024, 1.0
_ANSWER_WITHIN_S = 1.0


@dataclass(slots=True)
class _Step:
    """A plan that has begun and not ended."""

    plan: SchedulerOutput
    num_told: int = 0


class DrafterSessionQueue(ShmEndpoint):
    """An engine's connection and seat, with its messages in order."""

    def __init__(self, sock: socket.socket, hello: Hello, files: list[int], waiter: SpinWaiter) -> None:
        memory = SharedMemory(files[0], LAYOUT.size_bytes)
        super().__init__(memory, LAYOUT.line(0, 0), waiter)
        self._down, self._up = ShmRing.down(memory, LAYOUT), ShmRing.up(memory, LAYOUT, 0)
        self._add_peer(0, sock, 0)
        ticket = files[1] if len(files) > 1 else hello.mailbox
        self._mailbox, self._sizes = Mailbox.open(ticket, hello.sizes.total_bytes), hello.sizes
        self.name = hello.name
        self.rank_s = 0.0  # priority in the queue: the time it was served, starting at the others' minimum
        self._use = DrafterUse()  # not yet reported
        # when its last work, and the drafter's last rest, ended; see `work`
        self._free_s = self._awake_s = 0.0
        self._seat: DrafterSession | None = None
        self._asked: deque[DraftRequest] = deque()
        self._told: dict[int, deque[StepReport]] = {}
        self._open: deque[_Step] = deque()
        self._pages_of_slot: dict[int, set[int]] = {}

    def sit(self, seat: DrafterSession) -> None:
        self._seat = seat

    @property
    def seat(self) -> DrafterSession:
        assert self._seat is not None, "the client has no session yet"
        return self._seat

    def answer(self, message: object) -> None:
        self._write(self._up, message, _ANSWER_WITHIN_S, nothing)

    @property
    def has_gone(self) -> bool:
        return bool(self._lost)

    def take_mail(self) -> None:
        while self._down.has_next(0):
            message = self._read(self._down, 0, _ANSWER_WITHIN_S, nothing)
            if isinstance(message, DraftRequest):
                self._asked.append(message)
            else:
                self._told.setdefault(message.step, deque()).append(message)

    def has_mail(self) -> bool:
        return self._down.has_next(0)

    def has_work(self) -> bool:
        """Return whether `work` has something to do."""
        if self._open and self._told.get(self._open[0].plan.step):
            return True
        return bool(self._asked) and not any(self._overlaps(step.plan) for step in self._open)

    def work(self, awake_s: float) -> None:
        """Do the guest's next work: take in results of its oldest step, else draft for its next plan.

        Args:
            awake_s: time since which the drafter has worked for any guest without a rest.
        """
        self._awake_s = awake_s
        begin_s = time.monotonic()
        if self._open and (results := self._told.get(self._open[0].plan.step)):
            self._take_in(self._open[0], results.popleft(), begin_s)
        else:
            self._begin(self._asked.popleft(), begin_s)
        self._free_s = time.monotonic()
        self.rank_s += self._free_s - begin_s

    @torch.inference_mode()
    def _begin(self, ask: DraftRequest, begin_s: float) -> None:
        plan = ask.plan
        self.seat.begin(plan)
        self._record_pages(plan)
        self._open.append(_Step(plan))
        if plan.step in self._told or not plan.num_draft_tokens:
            self._record_use(ask.sent_s, begin_s)
            return  # the target could not wait, or wants no drafts
        proposed = self.seat.draft(plan)
        kinds = [(tuple(values.shape), values.dtype) for values in proposed]
        views = self._mailbox.views(ask.place * self._sizes.drafts_bytes, kinds)
        for view, values in zip(views, proposed, strict=True):
            view.copy_(values)
        self._mailbox.finish()
        at_s = self._record_use(ask.sent_s, begin_s, num_drafted=1)
        self.answer(Drafted(plan.step, at_s, self._take_use()))

    @torch.inference_mode()
    def _take_in(self, step: _Step, results: StepReport, begin_s: float) -> None:
        plan = step.plan
        num_parts = self.seat.num_parts(plan)
        verified = plan if results.num_drafts is None else plan.verifying(results.num_drafts)
        values = self._mailbox.views(results.offset, self.seat.told_kinds(verified, results.part))
        self.seat.take_in(verified, results.part, values, followed=results.followed)
        self._mailbox.finish()
        step.num_told += 1
        if step.num_told == num_parts:
            self._open.popleft()
            self._told.pop(plan.step)
        self._record_use(results.sent_s, begin_s)
        self.answer(StepReportDone(plan.step, results.part, self._take_use()))

    def _record_use(self, sent_s: float, begin_s: float, *, num_drafted: int = 0) -> float:
        """Record work that was requested at `sent_s`, began at `begin_s` and ends now; returns the time.

        It was queued since it was sent or since the guest's last work ended, as before that it could not be
        done. Waking the drafter does not count as queueing.
        """
        now_s = time.monotonic()
        queue_s = max(begin_s - max(sent_s, self._free_s, self._awake_s), 0.0)
        self._use += DrafterUse(num_drafted, queue_s, now_s - begin_s)
        return now_s

    def _take_use(self) -> DrafterUse:
        use, self._use = self._use, DrafterUse()
        return use

    def _overlaps(self, plan: SchedulerOutput) -> bool:
        """Return whether the guest's next plan has a slot, or a page formerly of a request, of this plan."""
        next_plan = self._asked[0].plan
        slots = set(plan.slots.tolist())
        if not slots.isdisjoint(next_plan.slots.tolist()):
            return True
        pages: set[int] = set().union(*(self._pages_of_slot.get(slot, set()) for slot in slots))
        return not pages.isdisjoint(next_plan.page_ids.tolist())

    def _record_pages(self, plan: SchedulerOutput) -> None:
        for request in plan.admitted:
            self._pages_of_slot[request.slot] = set()
        for slot, page in zip(plan.page_slots.tolist(), plan.page_ids.tolist(), strict=True):
            self._pages_of_slot.setdefault(slot, set()).add(page)


class DrafterServer:
    """Serves drafts to engines. Create it, pass `address` on, then call `serve` in one thread.

    Args:
        make_seat: creates a seat for a hello; raises a MantaError if it cannot.
    """

    def __init__(self, make_seat: Callable[[Hello], DrafterSession]) -> None:
        self._make_seat = make_seat
        self._door = doors.AbstractListener(backlog=64)
        self.address = self._door.address
        self._waiter = SpinWaiter(spin_budget_s(4))  # engine, target and drafter all compute
        self._waiter.listen(self._door.listener)
        self._guests: list[DrafterSessionQueue] = []

    def serve(self, linger_s: float = math.inf) -> None:
        """Serve until there has been no guest for `linger_s` seconds."""
        awake_s = time.monotonic()
        while True:
            self._accept_all()
            self._remove_gone()
            for guest in self._guests:
                self._run_for(guest, guest.take_mail)
            guests_with_work = [guest for guest in self._guests if guest.has_work()]
            if guests_with_work:
                guest = min(guests_with_work, key=lambda guest: guest.rank_s)
                self._run_for(guest, partial(guest.work, awake_s))
                continue
            try:
                self._waiter.wait(self._has_news, math.inf if self._guests else linger_s)
            except TimeoutError:
                return
            awake_s = time.monotonic()

    def _has_news(self) -> bool:
        return any(guest.has_mail() or guest.has_gone for guest in self._guests) or self._has_connection()

    def _has_connection(self) -> bool:
        return bool(select.select([self._door.listener], [], [], 0)[0])

    def _accept_all(self) -> None:
        while self._has_connection():
            sock = self._door.let_in()
            if sock is not None:
                self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.settimeout(_HELLO_WITHIN_S)
        try:
            data, files, _, _ = socket.recv_fds(sock, _HELLO_BYTES, 2)
        except OSError:
            data, files = b"", []
        if not data or not files:
            sock.close()
            return
        hello: Hello = pickle.loads(data)
        guest = DrafterSessionQueue(sock, hello, files, self._waiter)
        os.close(files[0])
        try:
            guest.sit(self._make_seat(hello))
        except MantaError as error:
            self._refuse(guest, DrafterRefusal(error))
        except Exception as error:  # one engine's failure must not end the other engines' sessions
            logger.exception("no session for %s", hello.name)
            self._refuse(
                guest,
                DrafterRefusal(EngineDeadError(f"The drafter failed ({type(error).__name__}: {error}).")),
            )
        else:
            guest.rank_s = min((other.rank_s for other in self._guests), default=0.0)
            self._guests.append(guest)
            self._run_for(guest, lambda: guest.answer(Welcome()))
            logger.info("%s has connected; there are now %d", hello.name, len(self._guests))

    def _refuse(self, guest: DrafterSessionQueue, refusal: DrafterRefusal) -> None:
        with contextlib.suppress(PeerLostError, TimeoutError):
            guest.answer(refusal)
        guest.close()

    def _run_for(self, guest: DrafterSessionQueue, work: Callable[[], None]) -> None:
        """Do work for a guest; an exception ends only this guest's session."""
        try:
            work()
        except (PeerLostError, TimeoutError) as error:
            self._remove(guest, str(error))
        except Exception as error:
            logger.exception("work for %s failed", guest.name)
            self._remove(guest, type(error).__name__)

    def _remove_gone(self) -> None:
        for guest in self._guests[:]:
            if guest.has_gone:
                self._remove(guest, "it disconnected")

    def _remove(self, guest: DrafterSessionQueue, reason: str) -> None:
        if guest in self._guests:
            self._guests.remove(guest)
            guest.close()
            logger.info("%s is disconnected (%s); there are now %d", guest.name, reason, len(self._guests))
