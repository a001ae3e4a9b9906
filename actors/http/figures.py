"""What one HTTP request cost: its `usage`, its `metrics` and its log line, counted as outputs come.

One HTTP request may hold several prompts, and each several completions. Times of the whole are the
earliest first token and the latest last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...cluster.acceptance import mean_acceptance_length
from ..chat.reasoning_tokens import ReasoningCounter
from ..outputs import RequestMetrics, RequestOutput
from ..telemetry import FinishedRequest, Telemetry
from .wire import JsonObject


class RequestFigures:
    """Counts one HTTP request. Fed by `Run` alone.

    Args:
        begun_token_ids: output that another engine generated; it is in `usage`, not in timings.
        new_counter: makes what counts the reasoning in a completion; None where that cannot be counted.
    """

    def __init__(
        self,
        num_prompts: int,
        begun_token_ids: Sequence[int] = (),
        new_counter: Callable[[], ReasoningCounter | None] = lambda: None,
    ) -> None:
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_output_tokens = 0
        self._num_begun = len(begun_token_ids)
        self._new_counter = new_counter
        self._counters: dict[tuple[int, int], ReasoningCounter | None] = {}  # as `_last_token_s`
        if begun_token_ids:
            self._count_reasoning((0, 0), begun_token_ids)
        self.finish_reasons: list[str] = []
        self._num_prompt_tokens = [0] * num_prompts
        self._costs: list[RequestMetrics | None] = [None] * num_prompts
        self._last_token_s: dict[tuple[int, int], float] = {}  # by prompt and completion

    def feed(self, prompt_index: int, output: RequestOutput, telemetry: Telemetry) -> None:
        self._num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self._costs[prompt_index] = output.metrics
        for completion in output.outputs:
            if completion.token_ids:
                key = (prompt_index, completion.index)
                self._count_reasoning(key, completion.token_ids)
                self._feed_tokens(key, len(completion.token_ids), output.metrics.queue_s, telemetry)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)

    def _feed_tokens(self, key: tuple[int, int], count: int, queue_s: float, telemetry: Telemetry) -> None:
        now_s, before_s = time.monotonic(), self._last_token_s.get(key)
        if before_s is None:
            telemetry.observe_first_token(now_s - self.started_s, queue_s)
        else:
            telemetry.observe_tokens(count, now_s - before_s)
        self._last_token_s[key] = self.last_token_s = now_s
        self.first_token_s = self.first_token_s or now_s
        self.num_output_tokens += count

    def _count_reasoning(self, key: tuple[int, int], token_ids: Sequence[int]) -> None:
        if key not in self._counters:
            self._counters[key] = self._new_counter()
        if counter := self._counters[key]:
            counter.feed(token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self._num_prompt_tokens)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def e2e_s(self) -> float:
        return (self.last_token_s or time.monotonic()) - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Over all prompts and completions."""
        costs = [cost for cost in self._costs if cost is not None]
        num_accepted = sum(cost.num_accepted_tokens for cost in costs)
        return mean_acceptance_length(sum(cost.num_steps for cost in costs), num_accepted)

    def usage(self) -> JsonObject:
        prompt, output = self.num_prompt_tokens, self._num_begun + self.num_output_tokens
        cached = sum(cost.num_cached_tokens for cost in self._costs if cost is not None)
        cached = min(cached, prompt)  # what another engine generated may be found, too
        return usage_of(prompt, output, cached, list(self._counters.values()))

    def metrics(self, num_spec_tokens: int, *, speculated: bool) -> JsonObject | None:
        """Timings and acceptance in vLLM's shape, for a request of one completion."""
        cost = self._costs[0]
        if cost is None or self.first_token_s is None or self.last_token_s is None:
            return None
        return {
            "time_to_first_token_ms": _ms(self.ttft_s),
            "generation_time_ms": _ms(self.last_token_s - self.first_token_s),
            "queue_time_ms": _ms(cost.queue_s),
            "mean_itl_ms": _ms(self.tpot_s),
            "tokens_per_second": round(self.num_output_tokens / self.e2e_s, 3) if self.e2e_s else None,
            "speculative_decoding": _acceptance(cost, num_spec_tokens) if speculated else None,
        }

    def finished(self, *, request_id: str, response_id: str, model: str, status: int) -> FinishedRequest:
        return FinishedRequest(
            request_id=request_id,
            id=response_id,
            model=model,
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            ttft_ms=_ms(self.ttft_s),
            tpot_ms=_ms(self.tpot_s),
            e2e_ms=round(self.e2e_s * 1000.0, 3),
            mean_acceptance_length=_rounded(self.mean_acceptance_length),
            finish_reason=self.finish_reasons[0] if self.finish_reasons else None,
            status=status,
        )


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    counters: Sequence[ReasoningCounter | None] = (),
) -> JsonObject:
    """OpenAI's `usage`; how much was reasoning is told where it was counted."""
    counted = [counter.count for counter in counters if counter is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        **({"completion_tokens_details": {"reasoning_tokens": sum(counted)}} if counted else {}),
    }


def _acceptance(cost: RequestMetrics, num_spec_tokens: int) -> JsonObject:
    """The histogram is dense: index = accepted drafts without the bonus token, 0..num_spec_tokens."""
    histogram = cost.acceptance_histogram + [0] * (num_spec_tokens + 1 - len(cost.acceptance_histogram))
    drafted = cost.num_draft_tokens
    return {
        "mean_acceptance_length": _rounded(cost.mean_acceptance_length),
        "draft_acceptance_rate": _rounded(cost.num_accepted_tokens / drafted) if drafted else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": cost.num_steps,
        "num_accepted_draft_tokens": cost.num_accepted_tokens,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
        "per_step_accepted": None,
        "per_step_drafted": None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
