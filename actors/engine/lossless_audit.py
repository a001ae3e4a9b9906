"""Recomputes finished responses in idle steps, for the lossless audit.

The audit decodes a response without speculation; the tokens must be equal.

A share of the responses is kept in memory (token ids, bounded). They are recomputed as background work while
no online request runs, without the prefix cache. An arriving online request cancels the work at once; the
audit later continues after the tokens already compared.

`manta audit` (jobs/audit/) does the same for a dataset. In half precision a row's bits depend on its batch,
so a near-tie may resolve differently: this counts as a mismatch, since the client would also see it. Runs on
the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from ...cluster.request.request import SamplingParams
from ..tokenization.prompts import EncodedPrompt
from .async_engine import AsyncEngine
from .outputs import RequestOutput, ResumeState

logger = logging.getLogger(__name__)

AuditResult = Literal["match", "mismatch", "skipped"]

MAX_WAITING = 64  # responses
MAX_WAITING_TOKENS = 1 << 18  # total tokens of the waiting responses and their prompts


@dataclass(slots=True, eq=False)
class AuditedAnswer:
    request_id: str
    response_id: str
    prompt: EncodedPrompt
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list[int])
    num_compared: int = 0  # number of leading tokens found to be equal

    def feed(self, output: RequestOutput) -> None:
        self.token_ids += output.outputs[0].token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.token_ids)

    def compare(self, output: RequestOutput) -> None:
        """Compare new tokens. Raises _DiffersError at the first difference."""
        for token_id in output.outputs[0].token_ids:
            if self.token_ids[self.num_compared : self.num_compared + 1] != [token_id]:
                raise _DiffersError
            self.num_compared += 1


class _DiffersError(Exception):
    pass


class LosslessAudit:
    def __init__(self, engine: AsyncEngine, share: float, count: Callable[[AuditResult], None]) -> None:
        self._engine = engine
        self._share = share
        self._count = count
        self._waiting: deque[AuditedAnswer] = deque()
        self._num_online = 0
        self._may_run = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @contextmanager
    def pause_for_online_request(self) -> Iterator[None]:
        self._num_online += 1
        self._may_run.clear()
        if self._running is not None:
            self._running.cancel()
        try:
            yield
        finally:
            self._num_online -= 1
            self._poll()

    def choose(
        self,
        request_id: str,
        response_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        resume_state: ResumeState,
    ) -> AuditedAnswer | None:
        """Return an `AuditedAnswer` if this request is sampled, else None.

        The request must then be served with its `params`, which have a seed, and its outputs passed to
        `feed`.
        """
        if random.random() >= self._share:
            return None
        token_ids = list(resume_state.token_ids)
        return AuditedAnswer(request_id, response_id, prompt, self._engine.with_seed(params), token_ids)

    def submit(self, answer: AuditedAnswer) -> None:
        num_tokens = sum(each.num_tokens for each in self._waiting)
        if len(self._waiting) == MAX_WAITING or num_tokens + answer.num_tokens > MAX_WAITING_TOKENS:
            self._count("skipped")
            return
        self._waiting.append(answer)
        self._poll()

    def _poll(self) -> None:
        if self._waiting and not self._num_online:
            self._may_run.set()

    async def work_forever(self) -> None:
        """Recompute queued responses while no online request runs, until cancelled."""
        while True:
            await self._may_run.wait()
            self._running = asyncio.create_task(self._audit(self._waiting[0]))
            try:
                await asyncio.wait({self._running})
            finally:
                self._running.cancel()
            ended, self._running = self._running, None
            if not ended.cancelled():
                self._waiting.popleft()
            if not self._waiting:
                self._may_run.clear()

    async def _audit(self, answer: AuditedAnswer) -> None:
        try:
            await self._compute(answer)
        except _DiffersError:
            self._report(answer)
        except Exception:  # the task's outermost level: skip this response, continue with the next
            logger.exception("request %s could not be audited", answer.request_id)
            self._count("skipped")
        else:
            self._count("match")

    async def _compute(self, answer: AuditedAnswer) -> None:
        """Decode the rest and the last compared token, as the run must end there. Raises _DiffersError."""
        answer.num_compared = min(answer.num_compared, len(answer.token_ids) - 1)
        await self._engine.complete(
            f"audit-{answer.response_id}",
            answer.prompt,
            replace(answer.params, logprobs=None, prompt_logprobs=None),
            watch=answer.compare,
            resume_state=ResumeState(tuple(answer.token_ids[: answer.num_compared])),
            max_draft_tokens=0,
            background=True,
            uses_cache=False,
            client_id=answer.request_id,
        )
        if answer.num_compared < len(answer.token_ids):
            raise _DiffersError

    def _report(self, answer: AuditedAnswer) -> None:
        self._count("mismatch")
        line = "the answer to request %s differs without speculation, from token %d of %d on"
        arguments = answer.request_id, answer.num_compared, len(answer.token_ids)
        logger.warning(line, *arguments, extra={"request_id": answer.request_id})
