"""Turns token updates into user output: text, stop strings, n completions, acceptance statistics.

Not thread-safe: `LLM` calls it inline, `AsyncEngine` on its event loop, outside of the step thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Unpack

from ...cluster.engine.engine_core import SequenceUpdate
from ...cluster.errors import NotANumberError
from ...cluster.request.request import FinishReason, Request, SamplingParams, SpeculationOptions
from ...cluster.step.clock import MACHINE_CLOCK, EngineClock
from ..chat.chat_model import ChatModel
from ..tokenization.prompts import EncodedPrompt, encode_bad_words
from ..tokenization.tokenizer import Tokenizer
from .outputs import (
    NOT_RESUMED,
    CompletionOutput,
    OutputLogprobs,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    ResumeState,
    TracedStep,
)


def resumed_text(
    tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams, resume_state: ResumeState
) -> str:
    """Return the text that the previous engine sent to the client."""
    return _Text(tokenizer, prompt, params, resume_state).text[: resume_state.num_chars]


class _Text:
    """The growing text of one completion. Finds stop strings and holds back text that may begin one."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams, resume_state: ResumeState
    ) -> None:
        self._stream = tokenizer.detokenizer(
            prompt,
            skip_special_tokens=params.skip_special_tokens,
            kept_token_ids=params.kept_special_token_ids,
        )
        self._stop = params.stop
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        # A stop string may begin in text that has already arrived: never emit what could be its beginning.
        self._num_held_back = 0 if self._keep_stop else max((len(s) for s in self._stop), default=1) - 1
        self.text = self._stream.step(resume_state.token_ids)
        # Not len(self.text): how much text the same tokens emitted depends on what was held back.
        self._emitted = resume_state.num_chars
        # Text that was searched for stop strings, but that later tokens may still change.
        self._ahead = self._stream.peek() if self._stop else ""

    def feed(self, token_ids: Sequence[int], num_before: int, *, ends: bool) -> tuple[int, str | None]:
        """Return how many tokens count, and the stop string that ended the text. `ends`: flush."""
        if not self._stop:
            self.text += self._stream.step(token_ids)
            self.text += self._stream.flush() if ends else ""
            return len(token_ids), None
        for used, token_id in enumerate(token_ids, start=1):
            hit = self._append(self._stream.step([token_id]), num_before + used)
            if hit is not None:
                return used, hit
        return len(token_ids), self._append(
            self._stream.flush(), num_before + len(token_ids)
        ) if ends else None

    def _append(self, fresh: str, num_tokens: int) -> str | None:
        """Append a token's text. Return the stop string that ends in it; the text is then cut there."""
        ahead = self._stream.peek()
        if not (fresh or ahead):
            return None
        begin = len(self.text)
        self.text += fresh
        # A stop string must end in text that was not searched before, which begins after the earlier `_ahead`
        # unless that has changed.
        if (fresh + ahead).startswith(self._ahead):
            begin += len(self._ahead)
        self._ahead = ahead
        return self._find_stop(self.text + ahead, begin) if num_tokens > self._min_tokens else None

    def take(self, *, final: bool) -> str:
        end = len(self.text) if final else max(self._emitted, len(self.text) - self._num_held_back)
        piece, self._emitted = self.text[self._emitted : end], end
        return piece

    def _find_stop(self, text: str, begin: int) -> str | None:
        found = [
            (at, stop) for stop in self._stop if (at := text.find(stop, max(0, begin - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        at, stop = min(found, key=lambda hit: hit[0])
        self.text = text[: at + (len(stop) if self._keep_stop else 0)]
        return stop


@dataclass(slots=True)
class _Completion:
    index: int
    text: _Text | None
    tokenizer: Tokenizer | None
    logprobs: OutputLogprobs | None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def feed(self, update: SequenceUpdate) -> tuple[CompletionOutput, bool]:
        """Return the new part, and whether a stop string ends the sequence early."""
        token_ids, hit = list(update.token_ids), None
        if self.text is not None:
            used, hit = self.text.feed(token_ids, len(self.token_ids), ends=update.finish_reason is not None)
            token_ids = token_ids[:used]
        self.token_ids.extend(token_ids)
        logprobs = None
        if self.logprobs is not None:
            logprobs = OutputLogprobs(self.tokenizer, update.logprobs, token_ids)
            self.logprobs.extend(logprobs)
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit
        else:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        piece = self.text.take(final=self.finish_reason is not None) if self.text is not None else ""
        ended = (self.finish_reason, self.stop_reason)
        delta = CompletionOutput(self.index, piece, token_ids, *ended, logprobs)
        return delta, hit is not None and update.finish_reason is None

    def complete_output(self) -> CompletionOutput:
        text = self.text.text if self.text is not None else ""
        ended = (self.finish_reason, self.stop_reason)
        return CompletionOutput(self.index, text, self.token_ids, *ended, self.logprobs)


class RequestTracker:
    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        resume_state: ResumeState = NOT_RESUMED,
        *,
        trace: bool = False,
        clock: EngineClock = MACHINE_CLOCK,
    ) -> None:
        assert params.n == 1 or not resume_state.token_ids, "only a single completion continues elsewhere"
        self.request_id = request_id
        self.prompt = prompt.text
        self.prompt_token_ids = list(prompt.token_ids)
        self._tokenizer, self._wants_prompt_logprobs = tokenizer, params.prompt_logprobs is not None
        self._prompt_logprobs_state: PromptLogprobs | None = None
        self.num_completions = self._num_unfinished = params.n
        self._completions = [
            _Completion(
                i,
                self._new_text(tokenizer, params, resume_state) if params.detokenize else None,
                tokenizer,
                None if params.logprobs is None else OutputLogprobs(tokenizer),
                list(resume_state.token_ids),
            )
            for i in range(params.n)
        ]
        self._clock = clock
        self._arrival_s = clock()
        self._first_token_s: float | None = None
        self._last_s = self._arrival_s
        self._num_cached = 0
        self._queue_s = 0.0
        self.finished = False  # whether all completions have a finish reason
        self._steps = RequestSteps(trace=trace and params.n == 1)

    def _new_text(
        self, tokenizer: Tokenizer | None, params: SamplingParams, resume_state: ResumeState
    ) -> _Text | None:
        return None if tokenizer is None else _Text(tokenizer, self.prompt_token_ids, params, resume_state)

    @property
    def child_ids(self) -> list[str]:
        """Ids of the completions in the engine."""
        count = len(self._completions)
        return [self.request_id if count == 1 else f"{self.request_id}-{i}" for i in range(count)]

    def fail(self) -> None:
        """End the unfinished completions with finish_reason "error"."""
        for completion in self._completions:
            completion.finish_reason = completion.finish_reason or "error"
        self.finished = True

    def feed(self, index: int, update: SequenceUpdate) -> tuple[CompletionOutput, bool]:
        self._last_s = self._clock()
        if update.token_ids and self._first_token_s is None:
            self._first_token_s = self._last_s
        self._num_cached = max(self._num_cached, update.num_cached_tokens)
        self._queue_s = max(self._queue_s, update.queue_s)
        if self._wants_prompt_logprobs and self._prompt_logprobs_state is None and update.token_ids:
            rows = update.prompt_logprobs
            self._prompt_logprobs_state = PromptLogprobs(self.prompt_token_ids, rows, self._tokenizer)
        completion = self._completions[index]
        delta, stopped = completion.feed(update)
        if completion.finish_reason is not None:
            self._num_unfinished -= 1
            self.finished = not self._num_unfinished
        self._steps.feed(update, len(delta.token_ids))
        return delta, stopped

    def forget_logprobs(self, index: int) -> None:
        """Drop a completion's delivered log probabilities; call `complete_output` no more."""
        if (logprobs := self._completions[index].logprobs) is not None:
            logprobs.clear()

    def complete_output(self) -> RequestOutput:
        return self.output([completion.complete_output() for completion in self._completions])

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            self.finished,
            self.metrics,
            self._prompt_logprobs_state,
        )

    @property
    def metrics(self) -> RequestMetrics:
        first, steps = self._first_token_s, self._steps
        return RequestMetrics(
            num_cached_tokens=self._num_cached,
            queue_s=self._queue_s,
            ttft_s=None if first is None else first - self._arrival_s,
            e2e_s=self._last_s - self._arrival_s,
            num_steps=steps.num_verify,
            num_draft_tokens=steps.num_drafted,
            num_accepted_tokens=steps.num_accepted,
            acceptance_histogram=list(steps.histogram),
            trace=tuple(steps.trace) if steps.trace is not None and self.finished else None,
        )


class RequestSteps:
    """Counts what the steps of one request drafted and accepted. `trace`: also record each step; only for a
    single completion.
    """

    def __init__(self, *, trace: bool) -> None:
        self.num_verify = 0  # steps that drafted
        self.num_drafted = 0  # drafts verified
        self.num_accepted = 0  # drafts accepted
        self.histogram: list[int] = []  # histogram[a] counts verify steps in which `a` drafts were accepted
        # the steps in order; None if not requested
        self.trace: list[TracedStep] | None = [] if trace else None

    def feed(self, update: SequenceUpdate, num_tokens: int) -> None:
        """Record a step of which `num_tokens` count."""
        if update.num_drafted:
            self.num_verify += 1
            self.num_drafted += update.num_drafted
            self.num_accepted += update.num_accepted
            missing = update.num_accepted + 1 - len(self.histogram)
            self.histogram.extend([0] * missing)
            self.histogram[update.num_accepted] += 1
        if self.trace is not None:
            self.trace.append(
                TracedStep(update.num_drafted, update.num_accepted, num_tokens, update.branches)
            )


class EngineOptions(SpeculationOptions, total=False):
    """Options of a request that are fields of `Request` in `cluster/request/request.py`."""

    priority: int
    cache_salt: str | None
    background: bool
    client_id: str | None
    owner: str | None
    uses_cache: bool


class RequestOptions(EngineOptions, total=False):
    """All options of a request.

    `resume_state`: output that another engine generated before. `trace`: the final metrics list every step.
    """

    trace: bool
    resume_state: ResumeState


class OutputProcessor:
    """Tracks user requests. `clock` is the engine's, on which requests arrive."""

    def __init__(self, tokenizer: Tokenizer | None, clock: EngineClock = MACHINE_CLOCK) -> None:
        self._tokenizer, self._clock = tokenizer, clock
        self._living: dict[str, tuple[RequestTracker, int]] = {}

    @cached_property
    def _chat(self) -> ChatModel:
        return ChatModel.of(self._tokenizer)

    def add(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        *,
        trace: bool = False,
        resume_state: ResumeState = NOT_RESUMED,
        **options: Unpack[EngineOptions],
    ) -> tuple[RequestTracker, list[Request]]:
        """Register a user request; return its tracker and one engine request per completion.

        `resume_state`: output of another engine, neither generated nor emitted again.
        """
        params = encode_bad_words(params, self._tokenizer)
        if params.thinking_token_budget is not None:
            params = self._chat.with_thinking_budget(params, prompt.text or "")
        tracker = RequestTracker(
            request_id, prompt, params, self._tokenizer, resume_state, trace=trace, clock=self._clock
        )
        requests: list[Request] = []
        for index, child_id in enumerate(tracker.child_ids):
            self._living[child_id] = (tracker, index)
            requests.append(
                Request(
                    request_id=child_id,
                    prompt_token_ids=prompt.token_ids,
                    params=params.child(index),
                    arrival_s=self._clock(),
                    output_token_ids=resume_state.token_ids,
                    **options,
                )
            )
        return tracker, requests

    def feed(self, update: SequenceUpdate) -> tuple[RequestTracker, CompletionOutput, bool] | None:
        """Return the tracker, the new output, and whether a stop string ends the sequence early.

        None for a request forgotten while its last step was in flight. Raises NotANumberError if the target
        computed NaN or infinite logits for it.
        """
        known = self._living.get(update.request_id)
        if known is None:
            return None
        tracker, index = known
        if update.finish_reason == "error":
            raise NotANumberError(
                "The model computed logits that are not numbers (NaN or infinity) for this request. Its "
                "weights hold such values, or its activations overflow: check the checkpoint, or serve it "
                "with --dtype bfloat16 or float32."
            )
        fresh, hit = tracker.feed(index, update)
        if hit or update.finish_reason is not None:
            del self._living[update.request_id]
        return tracker, fresh, hit

    def tracker_of(self, child_id: str) -> RequestTracker | None:
        known = self._living.get(child_id)
        return None if known is None else known[0]

    def forget(self, child_ids: Iterable[str]) -> None:
        for child_id in child_ids:
            self._living.pop(child_id, None)
