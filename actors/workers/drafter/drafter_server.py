"""A drafter as a server with one session per engine, served one at a time.

Each engine (a *client*) has a connection, a session of its own (`drafter_session.py`) and a place in a fair
queue: of those with work, the client that has used the least of the drafter's time is next. A client's
session is freed when it leaves, and no client can keep another one waiting. Does not use Ray.
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
from ..shm import abstract_sockets
from ..shm.endpoint import PeerLostError, ShmEndpoint, SpinWaiter, no_op, spin_budget_s
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

FIRST_CLIENT_S = 3600.0  # within which the target of a drafter's first client has loaded
_HELLO_BYTES, _HELLO_WITHIN_S = 256 * 1024, 10.0
_ANSWER_WITHIN_S = 1.0


@dataclass(slots=True)
class _Step:
    """A plan that has begun and not ended."""

    plan: SchedulerOutput
    num_reported: int = 0


class DrafterSessionQueue(ShmEndpoint):
    """An engine's connection and session, with its messages in order."""

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
        self._session: DrafterSession | None = None
        self._requests: deque[DraftRequest] = deque()
        self._results: dict[int, deque[StepReport]] = {}
        self._open: deque[_Step] = deque()
        self._pages_of_slot: dict[int, set[int]] = {}

    def attach_session(self, session: DrafterSession) -> None:
        self._session = session

    @property
    def session(self) -> DrafterSession:
        assert self._session is not None, "the client has no session yet"
        return self._session

    def answer(self, message: object) -> None:
        self._write(self._up, message, _ANSWER_WITHIN_S, no_op)

    @property
    def is_disconnected(self) -> bool:
        return bool(self._lost)

    def read_messages(self) -> None:
        while self._down.has_next(0):
            message = self._read(self._down, 0, _ANSWER_WITHIN_S, no_op)
            if isinstance(message, DraftRequest):
                self._requests.append(message)
            else:
                self._results.setdefault(message.step, deque()).append(message)

    def has_messages(self) -> bool:
        return self._down.has_next(0)

    def has_work(self) -> bool:
        if self._open and self._results.get(self._open[0].plan.step):
            return True
        return bool(self._requests) and not any(self._overlaps(step.plan) for step in self._open)

    def work(self, awake_s: float) -> None:
        """Take in results of the client's oldest step, else draft. `awake_s`: since the last rest."""
        self._awake_s = awake_s
        begin_s = time.monotonic()
        if self._open and (results := self._results.get(self._open[0].plan.step)):
            self._take_in(self._open[0], results.popleft(), begin_s)
        else:
            self._begin(self._requests.popleft(), begin_s)
        self._free_s = time.monotonic()
        self.rank_s += self._free_s - begin_s

    @torch.inference_mode()
    def _begin(self, request: DraftRequest, begin_s: float) -> None:
        plan = request.plan
        self.session.begin(plan)
        self._record_pages(plan)
        self._open.append(_Step(plan))
        if plan.step in self._results or not plan.num_draft_tokens:
            self._record_use(request.sent_s, begin_s)
            return  # the target could not wait, or wants no drafts
        proposed = self.session.draft(plan, has_grammars=request.has_grammars)
        kinds = [(tuple(values.shape), values.dtype) for values in proposed]
        views = self._mailbox.views(request.place * self._sizes.drafts_bytes, kinds)
        for view, values in zip(views, proposed, strict=True):
            view.copy_(values)
        self._mailbox.finish()
        at_s = self._record_use(request.sent_s, begin_s, num_drafted=1)
        self.answer(Drafted(plan.step, at_s, self._take_use()))

    @torch.inference_mode()
    def _take_in(self, step: _Step, results: StepReport, begin_s: float) -> None:
        plan = step.plan
        num_parts = self.session.num_parts(plan)
        verified = plan if results.num_drafts is None else plan.with_num_drafts(results.num_drafts)
        values = self._mailbox.views(results.offset, self.session.result_kinds(verified, results.part))
        self.session.take_in(verified, results.part, values, followed=results.followed)
        self._mailbox.finish()
        step.num_reported += 1
        if step.num_reported == num_parts:
            self._open.popleft()
            self._results.pop(plan.step)
        self._record_use(results.sent_s, begin_s)
        self.answer(StepReportDone(plan.step, results.part, self._take_use()))

    def _record_use(self, sent_s: float, begin_s: float, *, num_drafted: int = 0) -> float:
        """Record work that was requested at `sent_s`, began at `begin_s` and ends now; return the time.

        It was queued since it was sent or since the client's last work ended, as before that it could not be
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
        """Return whether the client's next plan has a slot, or a page of a slot, of this plan."""
        next_plan = self._requests[0].plan
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
    """Serves drafts to engines: pass `address` on, then call `serve`. `make_session` may raise MantaError."""

    def __init__(self, make_session: Callable[[Hello], DrafterSession]) -> None:
        self._make_session = make_session
        self._listener = abstract_sockets.AbstractListener(backlog=64)
        self.address = self._listener.address
        self._waiter = SpinWaiter(spin_budget_s(4))  # engine, target and drafter all compute
        self._waiter.listen(self._listener.listener)
        self._clients: list[DrafterSessionQueue] = []
        self._had_client = False

    def serve(self, linger_s: float = math.inf) -> None:
        """Serve until there has been no client for `linger_s` seconds after the last one.

        The first one's target may still be loading, which takes longer than a drafter.
        """
        awake_s = time.monotonic()
        while True:
            self._accept_all()
            self._remove_disconnected()
            for client in self._clients:
                self._run_for(client, client.read_messages)
            clients_with_work = [client for client in self._clients if client.has_work()]
            if clients_with_work:
                client = min(clients_with_work, key=lambda client: client.rank_s)
                self._run_for(client, partial(client.work, awake_s))
                continue
            try:
                patience_s = linger_s if self._had_client else max(linger_s, FIRST_CLIENT_S)
                self._waiter.wait(self._has_messages, math.inf if self._clients else patience_s)
            except TimeoutError:
                return
            awake_s = time.monotonic()

    def _has_messages(self) -> bool:
        return (
            any(client.has_messages() or client.is_disconnected for client in self._clients)
            or self._has_connection()
        )

    def _has_connection(self) -> bool:
        return bool(select.select([self._listener.listener], [], [], 0)[0])

    def _accept_all(self) -> None:
        while self._has_connection():
            sock = self._listener.accept()
            if sock is not None:
                self._had_client = True  # also one that is refused
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
        client = DrafterSessionQueue(sock, hello, files, self._waiter)
        os.close(files[0])
        try:
            client.attach_session(self._make_session(hello))
        except MantaError as error:
            self._refuse(client, DrafterRefusal(error))
        except Exception as error:  # one engine's failure must not end the other engines' sessions
            logger.exception("no session for %s", hello.name)
            self._refuse(
                client,
                DrafterRefusal(EngineDeadError(f"The drafter failed ({type(error).__name__}: {error}).")),
            )
        else:
            client.rank_s = min((other.rank_s for other in self._clients), default=0.0)
            self._clients.append(client)
            self._run_for(client, lambda: client.answer(Welcome()))
            logger.info("%s has connected; there are now %d", hello.name, len(self._clients))

    def _refuse(self, client: DrafterSessionQueue, refusal: DrafterRefusal) -> None:
        with contextlib.suppress(PeerLostError, TimeoutError):
            client.answer(refusal)
        client.close()

    def _run_for(self, client: DrafterSessionQueue, work: Callable[[], None]) -> None:
        """Do work for a client; an exception ends only this client's session."""
        try:
            work()
        except (PeerLostError, TimeoutError) as error:
            self._remove(client, str(error))
        except Exception as error:
            logger.exception("work for %s failed", client.name)
            self._remove(client, type(error).__name__)

    def _remove_disconnected(self) -> None:
        for client in self._clients[:]:
            if client.is_disconnected:
                self._remove(client, "it disconnected")

    def _remove(self, client: DrafterSessionQueue, reason: str) -> None:
        if client in self._clients:
            self._clients.remove(client)
            client.close()
            logger.info("%s is disconnected (%s); there are now %d", client.name, reason, len(self._clients))
