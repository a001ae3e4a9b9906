"""Answers that are computed once more in idle steps: for the audit, and for a drafter's trial in the shadow.

The audit computes without speculation and compares token by token. Speculation changes no token; this is
whoever doubts it, at work on real traffic. The trial (`cluster/fleet/canary.py`) computes with the drafter
and with the candidate, and compares what their drafts are worth.

A share of the answers is kept (token ids, in memory, bounded) and computed anew when no online request is
here: as background work, and from nothing (no page of the prefix cache is read, and none is left there). An
online request that comes ends that at once; later the audit goes on behind the tokens that were compared.
`manta audit` (jobs/audit/) does the same for a dataset, with whole blocks. In half precision, where a row's
bits depend on its batch, a near-tie may fall otherwise: that is a mismatch here, too, for it is one to the
client. Fed by `http/generation/request_run.py`; all on the event loop.
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

from ...cluster.fleet.canary import ArmStats, CanaryTrial
from ...cluster.request.request import SamplingParams
from ..tokenization.prompts import EncodedPrompt
from .async_engine import AsyncEngine
from .output_processor import Begun, RequestOutput

logger = logging.getLogger(__name__)

AuditResult = Literal["match", "mismatch", "skipped"]

MAX_WAITING = 64  # answers
MAX_WAITING_TOKENS = 1 << 18  # theirs and their prompts', together


@dataclass(slots=True, eq=False)
class AuditedAnswer:
    """An answer that was chosen, as it comes.

    Attributes:
        num_compared: so many of its tokens have been found to be right.
        audits: whether they are to be compared (yet).
        trial: for which it is to be decoded by both drafters.
        tallies: of those that have done so.
    """

    request_id: str
    response_id: str
    prompt: EncodedPrompt
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list[int])
    num_compared: int = 0
    audits: bool = True
    trial: CanaryTrial | None = None
    tallies: list[ArmStats] = field(default_factory=list[ArmStats])

    def feed(self, output: RequestOutput) -> None:
        """What is new of it."""
        self.token_ids += output.outputs[0].token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.token_ids)

    def compare(self, output: RequestOutput) -> None:
        """What is new of the answer without speculation. Raises _DiffersError at the first other token."""
        for token_id in output.outputs[0].token_ids:
            if self.token_ids[self.num_compared : self.num_compared + 1] != [token_id]:
                raise _DiffersError
            self.num_compared += 1


class _DiffersError(Exception):
    """The answers differ behind the tokens that were compared."""


class LosslessAudit:
    """Of one engine.

    Args:
        engine: computes them.
        share: of the answers that are audited.
        count: told what came of each.
    """

    def __init__(self, engine: AsyncEngine, share: float, count: Callable[[AuditResult], None]) -> None:
        self._engine = engine
        self._share = share
        self._count = count
        self._waiting: deque[AuditedAnswer] = deque()
        self._num_online = 0
        self._may_run = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @contextmanager
    def online(self) -> Iterator[None]:
        """An online request is here: nothing is audited meanwhile."""
        self._num_online += 1
        self._may_run.clear()
        if self._running is not None:
            self._running.cancel()
        try:
            yield
        finally:
            self._num_online -= 1
            self._look()

    def choose(
        self, request_id: str, response_id: str, prompt: EncodedPrompt, params: SamplingParams, begun: Begun
    ) -> AuditedAnswer | None:
        """Whether the answer to this request is one of the share: then serve it with the `params` that are in
        what comes back, which have a seed, and feed that."""
        audits, trial = random.random() < self._share, self._shadow()
        if not audits and trial is None:
            return None
        told = request_id, response_id, prompt, self._engine.seeded(params), list(begun.token_ids)
        return AuditedAnswer(*told, audits=audits, trial=trial)

    def _shadow(self) -> CanaryTrial | None:
        """The trial that this answer is for, if there is one and it is."""
        trial = self._engine.trial
        if trial is None or not trial.rules.shadow or random.random() >= trial.rules.fraction:
            return None
        return trial

    def submit(self, answer: AuditedAnswer) -> None:
        """A whole answer."""
        kept = sum(each.num_tokens for each in self._waiting)
        if len(self._waiting) == MAX_WAITING or kept + answer.num_tokens > MAX_WAITING_TOKENS:
            if answer.audits:
                self._count("skipped")
            return
        self._waiting.append(answer)
        self._look()

    def _look(self) -> None:
        if self._waiting and not self._num_online:
            self._may_run.set()

    async def work_forever(self) -> None:
        """One answer after the other, whenever there is nothing else. Cancelled at the end."""
        while True:
            await self._may_run.wait()
            self._running = asyncio.create_task(self._compute_anew(self._waiting[0]))
            try:
                await asyncio.wait({self._running})
            finally:
                self._running.cancel()
            ended, self._running = self._running, None
            if not ended.cancelled():
                self._waiting.popleft()
            if not self._waiting:
                self._may_run.clear()

    async def _compute_anew(self, answer: AuditedAnswer) -> None:
        if answer.audits:
            await self._audit(answer)
            answer.audits = False
        if answer.trial is not None and answer.trial is self._engine.trial:
            await self._try_both(answer, answer.trial)

    async def _try_both(self, answer: AuditedAnswer, trial: CanaryTrial) -> None:
        """The same tokens by the drafter and by the candidate; who was done before stays done."""
        try:
            while len(answer.tallies) < 2:
                answer.tallies.append(await self._decode(answer, on_trial=bool(answer.tallies)))
        except Exception:  # a task's edge: no word on this answer, and the next one has its turn
            logger.exception("request %s could not be decoded again for the trial", answer.request_id)
        else:
            trial.compare(*answer.tallies)

    async def _decode(self, answer: AuditedAnswer, *, on_trial: bool) -> ArmStats:
        """What one of the two brings."""
        output = await self._engine.complete(
            f"{'candidate' if on_trial else 'incumbent'}-{answer.response_id}",
            answer.prompt,
            replace(answer.params, logprobs=None, prompt_logprobs=None),
            background=True,
            uses_cache=False,
            client_id=answer.request_id,
            on_trial=on_trial,
        )
        return output.metrics.brought

    async def _audit(self, answer: AuditedAnswer) -> None:
        try:
            await self._compute(answer)
        except _DiffersError:
            self._report(answer)
        except Exception:  # a task's edge: no word on this answer, and the next one has its turn
            logger.exception("request %s could not be audited", answer.request_id)
            self._count("skipped")
        else:
            self._count("match")

    async def _compute(self, answer: AuditedAnswer) -> None:
        """Raises _DiffersError. What was compared before is not computed again, but for a last token: that
        the answer ends there must be seen."""
        answer.num_compared = min(answer.num_compared, len(answer.token_ids) - 1)
        await self._engine.complete(
            f"audit-{answer.response_id}",
            answer.prompt,
            replace(answer.params, logprobs=None, prompt_logprobs=None),
            watch=answer.compare,
            begun=Begun(tuple(answer.token_ids[: answer.num_compared])),
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
        told = answer.request_id, answer.num_compared, len(answer.token_ids)
        logger.warning(line, *told, extra={"request_id": answer.request_id})
