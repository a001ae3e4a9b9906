"""The engine: requests in, updates out, one step after the other. `step` is all there is to it.

Checks requests, times the parts of a step, snapshots figures. Decisions are the scheduler's; computing is the
executor's. Not thread-safe but for `stats` and `has_unfinished`, which only read. Used by `LLM`, by
`AsyncEngine` and by simulations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .config import EngineConfig
from .errors import OverloadedError, RequestError, UnprocessableError
from .executor import Executor
from .plan import SchedulerOutput, StepResult
from .request import FinishReason, Request
from .scheduler import Scheduler, SchedulerConfig
from .sequence import SequenceUpdate

__all__ = ["Engine", "EngineStats", "SequenceUpdate"]

STEP_PARTS = ("schedule", "execute", "draft", "verify", "sample", "inject", "commit")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts are cumulative; `running`, `waiting` and `kv_usage` (0 to 1) are of now.

    `prefix_cache_*` count tokens. `num_drafts` counts requests x steps that verified drafts, and
    `accepted_per_pos[i]` in how many of them draft i was accepted. `step_seconds` sums up the STEP_PARTS;
    "execute" holds draft, verify, sample and inject.
    """

    running: int
    waiting: int
    kv_usage: float
    steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_pos: tuple[int, ...]
    step_seconds: dict[str, float]


class Engine:
    """One scheduler over one executor.

    Args:
        config: settings.
        executor: loaded and ready.
        clock: seconds, for the timing of steps.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = executor
        self._scheduler = Scheduler(SchedulerConfig.derive(config, executor.info))
        self._max_queued = config.max_num_queued_reqs
        self._clock = clock
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run, OverloadedError if it cannot now."""
        check_request(request, self._scheduler.config)
        if request.request_id in self._scheduler:
            raise RequestError(
                f"request_id={request.request_id!r} is already running; give each request an id of its own.",
                param="request_id",
            )
        waiting = len(self._scheduler.waiting)
        if self._max_queued is not None and waiting >= self._max_queued:
            raise OverloadedError(
                f"{waiting} requests are waiting (max_num_queued_reqs={self._max_queued}). Retry."
            )
        self._scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """End a request before the next plan; False if it is not here. Its tokens in flight are dropped.

        Args:
            request_id: whose; the caller knows it ended, so no update follows.
            reason: "stop" when a stop string was found in its text.
        """
        return self._scheduler.abort(request_id)

    def step(self) -> list[SequenceUpdate]:
        """Run one step; an empty list if there is nothing to do, or if it brought no tokens."""
        plan = self.plan()
        if plan is None:
            return []
        begin_s = self._clock()
        result = self._executor.execute(plan)
        self._seconds["execute"] += self._clock() - begin_s
        return self.commit(plan, result)

    def plan(self) -> SchedulerOutput | None:
        """Decide the next step; None if there is nothing to do. It must be committed before the next one."""
        begin_s = self._clock()
        plan = self._scheduler.schedule()
        self._seconds["schedule"] += self._clock() - begin_s
        return plan

    def commit(self, plan: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Take in what came of the plan in flight."""
        begin_s = self._clock()
        updates = self._scheduler.commit(plan, result)
        seconds, timings = self._seconds, result.timings
        seconds["draft"] += timings.draft_s
        seconds["verify"] += timings.verify_s
        seconds["sample"] += timings.sample_s
        seconds["inject"] += timings.inject_s
        seconds["commit"] += self._clock() - begin_s
        return updates

    @property
    def has_unfinished(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        counters, pool = scheduler.counters, scheduler.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=1.0 - pool.num_free / pool.num_pages,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            preemptions=counters.preemptions,
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            accepted_per_pos=tuple(counters.accepted_per_pos.tolist()),
            step_seconds=dict(self._seconds),
        )

    def reset_prefix_cache(self) -> None:
        """Forget the content of all pages; what runs goes on."""
        self._scheduler.cache.clear()

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._executor.close()

    def check_invariants(self) -> None:
        """Assert that no page, slot or token is lost or doubled. For tests; costs a look at everything."""
        self._scheduler.check_invariants()


def check_request(request: Request, limits: SchedulerConfig) -> None:
    """Raise RequestError if the request can never be served, naming the field and what would be right."""
    prompt, params = request.prompt_token_ids, request.params
    assert params.n == 1, "SamplingParams.child() splits n completions before the engine"
    length = len(prompt)
    if length == 0:
        raise RequestError("The prompt is empty; it must have at least one token.", param="prompt")
    _check_vocabulary("prompt", prompt, limits.vocab_size)
    _check_vocabulary("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    if length + 1 > limits.max_model_len:
        raise RequestError(
            f"The prompt has {length} tokens; with one to generate it must fit max_model_len="
            f"{limits.max_model_len}. Shorten it, or raise max_model_len.",
            param="prompt",
        )
    if not limits.enable_chunked_prefill and length > limits.max_rows:
        raise RequestError(
            f"The prompt has {length} tokens; without chunked prefill it must fit a step of "
            f"max_num_batched_tokens={limits.max_rows}. Shorten it, or enable chunked prefill.",
            param="prompt",
        )
    needed = min(length + (params.max_tokens or 1), limits.max_model_len)
    if needed > limits.max_length:
        raise UnprocessableError(
            f"The prompt has {length} tokens and max_tokens={params.max_tokens}: {needed} tokens, but the "
            f"K/V pages hold {limits.max_length}. Lower max_tokens, shorten the prompt, or raise "
            "kv_cache_memory_bytes.",
            param="max_tokens" if length + 1 <= limits.max_length else "prompt",
        )


def _check_vocabulary(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise RequestError(f"{field} holds token {wrong}; tokens are 0 to {vocab_size - 1}.", param=field)
