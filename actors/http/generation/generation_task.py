"""One HTTP request to generate, after all checks that need no engine, and what is counted of it.

`GenerationTask` is a value; `request_run.py` runs it and feeds `RequestStats`, which makes `usage`, times and
the log line. A request may have several prompts, each with several completions. Its times are those of the
earliest first token and the latest last token.

`acceptance` makes `metrics.speculative_decoding` of a response: acceptance in vLLM's format, and our trace.

    "speculative_decoding": {"mean_acceptance_length": 2.5, ..,       vLLM's `summary`
                             "per_step_accepted": [1, 2],             vLLM's `detailed`: of verify steps
                             "per_step_drafted": [3, 3],
                             "trace": {"first_token": 0,              if the request asks for it
                                       "origins": ["plain", "draft", "bonus", "draft", "draft", "bonus"],
                                       "steps": [0, 1, 1, 2, 2, 2],
                                       "truncated": false}}

A trace has an entry per token of the answer: its origin, and the index of its step among all steps that
produced tokens, including plain ones. If drafts of a tree's branches were accepted, `branches` has the rank
of each accepted draft among the alternatives that were verified at its position, 0 for the best.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ....cluster.request.caller import Caller, Tenant
from ....cluster.request.request import SamplingParams
from ....cluster.speculation.acceptance_length import mean_acceptance_length
from ...chat.chat_model import PLAIN, AnswerParserFactory, ReasoningCounter
from ...engine.outputs import (
    NOT_RESUMED,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    ResumeState,
    TracedStep,
    token_origins,
)
from ...observability.telemetry import EndedPrompt, FinishedCompletion, RequestTelemetry
from ...tokenization.prompts import EncodedPrompt
from ..protocol.completion import CompletionRequest
from ..protocol.protocol import GenerationRequest
from ..wire.json_io import JsonObject
from ..wire.sse import Ending
from .resume_origin import TOKENS_HEADER, ResumeOrigin, reporting_errors

_UNPRINTABLE = re.compile(r"[^\w.$-]", re.ASCII)
# Of X-Ignored-Params. A name that is cut keeps its end, which is the ignored field.
MAX_NAMES, MAX_NAME_CHARS = 20, 160


def operation_of(request: GenerationRequest) -> str:
    return "text_completion" if isinstance(request, CompletionRequest) else "chat"


@dataclass(frozen=True, slots=True)
class GenerationTask:
    id: str  # of the response, also the engine's
    request_id: str  # the client's
    model: str
    prompts: list[EncodedPrompt]
    params: SamplingParams
    priority: int
    ignored: list[str]
    request: GenerationRequest
    created_s: int  # Unix time
    caller: Caller  # the key that sent it
    tenant: Tenant  # tenant and category that it is counted for
    may_be_captured: bool = True  # traffic capture may keep it
    origin: ResumeOrigin | None = None  # what a gateway has fixed for the request
    parsers: AnswerParserFactory = PLAIN  # parses its answers
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # the client's trace context

    @property
    def operation(self) -> str:
        return operation_of(self.request)

    @property
    def single(self) -> bool:
        return len(self.prompts) == 1 and self.params.n == 1

    @property
    def reports_tokens(self) -> bool:
        """Return whether the stream reports its tokens to a gateway.

        Only a single completion can continue at another replica, without an echo or log probabilities: their
        offsets count from the beginning of the text, which the other replica has not generated.
        """
        is_single = self.single and self.params.logprobs is None
        is_single = is_single and not self.request.echoes
        return self.origin is not None and self.request.stream and is_single

    def ending(self, ending: Ending) -> Ending:
        """Return the ending of the stream, given its API's: it also reports errors to a gateway."""
        return reporting_errors(ending) if self.reports_tokens else ending

    @property
    def resume_state(self) -> ResumeState:
        return NOT_RESUMED if self.origin is None else self.origin.resume_state

    @property
    def num_events_sent(self) -> int:
        """Return the number of events that the client already has from another replica."""
        return 0 if self.origin is None else self.origin.num_events

    @property
    def headers(self) -> dict[str, str]:
        """X-Ignored-Params, as far as the names fit a header, and the header for the gateway."""
        names = [_UNPRINTABLE.sub("?", name)[-MAX_NAME_CHARS:] for name in self.ignored[:MAX_NAMES]]
        if len(self.ignored) > MAX_NAMES:
            names.append(f"{len(self.ignored) - MAX_NAMES} more")
        headers = {"X-Ignored-Params": ",".join(names)} if names else {}
        return headers | ({TOKENS_HEADER: "1"} if self.reports_tokens else {})


@dataclass(slots=True)
class _Tokens:
    """Times are monotonic."""

    first_s: float
    last_s: float
    count: int


class RequestStats:
    """Counts one HTTP request. Only `GenerationRun` feeds it.

    `resumed_token_ids`: output that another engine generated; included in `usage`, not in times.
    `new_counter` returns a counter of a completion's reasoning tokens; None if they cannot be counted.
    """

    def __init__(
        self,
        num_prompts: int,
        params: SamplingParams,
        resumed_token_ids: Sequence[int] = (),
        new_counter: Callable[[], ReasoningCounter | None] = lambda: None,
    ) -> None:
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_output_tokens = 0
        self._num_resumed = len(resumed_token_ids)
        self._new_counter = new_counter
        self._counters: dict[tuple[int, int], ReasoningCounter | None] = {}  # same keys as `_tokens`
        if resumed_token_ids:
            self._count_reasoning((0, 0), resumed_token_ids)
        self.finish_reasons: list[str] = []
        self._num_prompt_tokens = [0] * num_prompts
        self._costs: list[RequestMetrics | None] = [None] * num_prompts
        self._params = params
        self._tokens: dict[tuple[int, int], _Tokens] = {}  # by (prompt, completion)

    def feed(self, prompt_index: int, output: RequestOutput, telemetry: RequestTelemetry) -> None:
        self._num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self._costs[prompt_index] = output.metrics
        for completion in output.outputs:
            if completion.token_ids:
                key = (prompt_index, completion.index)
                self._count_reasoning(key, completion.token_ids)
                self._feed_tokens(key, len(completion.token_ids), telemetry)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)
                self._end(prompt_index, completion, output, telemetry)

    def _feed_tokens(self, key: tuple[int, int], count: int, telemetry: RequestTelemetry) -> None:
        now_s, tokens = time.monotonic(), self._tokens.get(key)
        if tokens is None:
            self._tokens[key] = _Tokens(now_s, now_s, count)
            telemetry.observe_first_token(now_s - self.started_s)
        else:
            telemetry.observe_tokens(count, now_s - tokens.last_s)
            tokens.last_s, tokens.count = now_s, tokens.count + count
        self.last_token_s = now_s
        self.first_token_s = self.first_token_s or now_s
        self.num_output_tokens += count

    def _end(
        self,
        prompt_index: int,
        completion: CompletionOutput,
        output: RequestOutput,
        telemetry: RequestTelemetry,
    ) -> None:
        """Record the end of a completion (unless aborted), and with the last one of its prompt."""
        if completion.finish_reason in ("abort", "error"):
            return
        tokens = self._tokens.get((prompt_index, completion.index))
        telemetry.end_completion(
            FinishedCompletion(
                num_tokens=tokens.count if tokens else 0,
                max_tokens=self._params.max_tokens,
                queue_s=output.metrics.queue_s,
                first_s=tokens.first_s - self.started_s if tokens else None,
                last_s=tokens.last_s - self.started_s if tokens else None,
            )
        )
        if output.finished:
            found = [self._tokens.get((prompt_index, index)) for index in range(self._params.n)]
            num_prompt_tokens = len(output.prompt_token_ids)
            longest = max(each.count if each else 0 for each in found)
            ended = EndedPrompt(num_prompt_tokens, output.metrics.num_cached_tokens, self._params.n, longest)
            telemetry.end_prompt(ended)

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
        num_accepted = sum(cost.num_accepted_tokens for cost in self.costs)
        return mean_acceptance_length(sum(cost.num_steps for cost in self.costs), num_accepted)

    def count_by_tenant(self, tenant: Tenant, telemetry: RequestTelemetry) -> None:
        """Count the tokens and drafts of a request that has ended, whether it succeeded or failed."""
        costs = [cost for cost in self._costs if cost is not None]
        num_accepted = sum(cost.num_accepted_tokens for cost in costs)
        num_steps = sum(cost.num_steps for cost in costs)
        telemetry.count_by_tenant(tenant, self.num_output_tokens, num_steps, num_accepted)

    def usage(self) -> JsonObject:
        prompt, output = self.num_prompt_tokens, self._num_resumed + self.num_output_tokens
        cached = sum(cost.num_cached_tokens for cost in self.costs)
        cached = min(cached, prompt)  # output that another engine generated may be cached, too
        return usage_of(prompt, output, cached, list(self._counters.values()))

    @property
    def costs(self) -> list[RequestMetrics]:
        return [cost for cost in self._costs if cost is not None]

    @property
    def cost(self) -> RequestMetrics | None:
        """Metrics of a request with one prompt; None before its first output."""
        return self._costs[0]

    def times(self) -> JsonObject:
        """Return vLLM's times, for a request of one completion."""
        first_s, last_s = self.first_token_s, self.last_token_s
        return {
            "time_to_first_token_ms": _ms(self.ttft_s),
            "generation_time_ms": None if first_s is None or last_s is None else _ms(last_s - first_s),
            "queue_time_ms": None if self.cost is None else _ms(self.cost.queue_s),
            "mean_itl_ms": _ms(self.tpot_s),
            "tokens_per_second": round(self.num_output_tokens / self.e2e_s, 3) if self.e2e_s else None,
        }

    def log_fields(self) -> JsonObject:
        mean = self.mean_acceptance_length
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "ttft_ms": _ms(self.ttft_s),
            "tpot_ms": _ms(self.tpot_s),
            "e2e_ms": round(self.e2e_s * 1000.0, 3),
            "mean_acceptance_length": None if mean is None else round(mean, 4),
            "finish_reason": self.finish_reasons[0] if self.finish_reasons else None,
        }


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    counters: Sequence[ReasoningCounter | None] = (),
) -> JsonObject:
    """Return OpenAI's `usage`, with reasoning tokens if they were counted."""
    counted = [counter.count for counter in counters if counter is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        **({"completion_tokens_details": {"reasoning_tokens": sum(counted)}} if counted else {}),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)


MAX_TRACED_TOKENS = 16_384  # about 200 kB of JSON


def acceptance(
    cost: RequestMetrics, num_spec_tokens: int, *, detailed: bool, first_traced: int | None = None
) -> JsonObject:
    """Return the object for a request with one completion.

    The histogram is dense: index = accepted drafts without the bonus token, 0..num_spec_tokens (most drafts
    per step). `detailed` includes each verify step; `first_traced`, a trace of the answer from this token on.
    """
    histogram = cost.acceptance_histogram + [0] * (num_spec_tokens + 1 - len(cost.acceptance_histogram))
    drafted, trace = cost.num_draft_tokens, cost.trace or ()
    verified = [step for step in trace if step.num_drafted]
    found: JsonObject = {
        # Numbers even if nothing was drafted: vLLM's format has them, and clients check it.
        "mean_acceptance_length": round(cost.mean_acceptance_length or 1.0, 4),
        "draft_acceptance_rate": round(cost.num_accepted_tokens / drafted, 4) if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": cost.num_steps,
        "num_accepted_draft_tokens": cost.num_accepted_tokens,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
        "per_step_accepted": [step.num_accepted for step in verified] if detailed else None,
        "per_step_drafted": [step.num_drafted for step in verified] if detailed else None,
    }
    return found if first_traced is None else {**found, "trace": _trace(trace, first_traced)}


def _trace(steps: Sequence[TracedStep], first_token: int) -> JsonObject:
    origins = list(islice(token_origins(steps), MAX_TRACED_TOKENS))
    branches = {"branches": _branches(steps, len(origins))} if any(step.branches for step in steps) else {}
    return {
        "first_token": first_token,
        "origins": [origin for _, origin in origins],
        "steps": [number for number, _ in origins],
        **branches,
        "truncated": sum(step.num_tokens for step in steps) > len(origins),
    }


def _branches(steps: Sequence[TracedStep], num_tokens: int) -> list[int]:
    """Return the rank of each token's draft among the alternatives; 0 where there is no accepted draft."""
    ranks = (rank for step in steps for rank in (*step.branches, *[0] * step.num_tokens)[: step.num_tokens])
    return list(islice(ranks, num_tokens))
