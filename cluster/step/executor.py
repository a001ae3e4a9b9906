"""The interface between decisions and computation: an `Executor` runs planned steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..pages.kv_cache_groups import KVCacheGroup
from ..request.request import SamplingParams
from .clock import EngineClock
from .draft_shape import UNBRANCHED, DraftShape
from .page_transfer import KVTierInfo
from .scheduler_output import SchedulerOutput, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Facts learned while loading that the scheduler needs.

    Attributes:
        num_pages: pages of `page_size` tokens in each K/V pool.
        max_model_len: longest sequence, prompt and output, in tokens.
        vocab_size: token ids are below it.
        num_speculative_tokens: most drafts on a path (block size - 1); 0 for plain decoding.
        draft_shape: the most drafts of a request if they may branch.
        max_in_flight: steps that may be submitted before the first is collected; with 2 the scheduler plans
            the next step while the device computes one.
        max_stop_token_ids: most tokens that may end a request, including the model's own; None for no limit.
        rule_limits: limits of a request's rules; None for no limit.
        num_states: recurrent states, each for a running sequence or a saved prefix; None if the target has no
            recurrent layers.
        page_groups: which layers have the same window, and from which pool their pages come.
        halves: whether a plan is drafted while the previous one is verified, if they have no slot in common;
            `max_in_flight` is at least 2 then. The scheduler measures which is faster: two alternating halves
            of the running requests, or all of them with one plan at a time. Alternating plans only have a
            slot in common if it is given to another request while a step of its last one is in flight.
        max_num_batched_tokens: most rows of a step, unless it is a setting.
        row_buckets: rows of a decoding pass, ascending: a pass takes as long as the next larger bucket, and
            prompts are computed in a separate pass. None: every row counts, in one pass.
        kv_tier: what keeps pages below the cache; an executor with a tier is a `MovesPages`.
    """

    num_pages: tuple[int, ...]
    page_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_speculative_tokens: int
    dtype: str
    device: str
    max_num_batched_tokens: int = 2048
    max_in_flight: int = 1
    max_stop_token_ids: int | None = None
    has_grammars: bool = True
    rule_limits: RuleLimits | None = None
    num_states: int | None = None
    page_groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),)
    halves: bool = False
    row_buckets: tuple[int, ...] | None = None
    draft_shape: DraftShape = UNBRANCHED
    kv_tier: KVTierInfo | None = None


@dataclass(frozen=True, slots=True)
class DrafterHealth:
    """The state of an executor's drafter.

    Attributes:
        ready: whether drafts may be requested. If a drafter was lost during a step, the target verified
            arbitrary tokens instead of its drafts, which only costs time.
        generation: counts drafters. A new one has no context of steps submitted before it was reported. One
            that was away for a while and missed nothing keeps its number.
    """

    ready: bool = True
    generation: int = 0


class Executor(Protocol):
    """Runs steps in the order of submission. Not thread-safe: one engine loop owns it."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def clock(self) -> EngineClock:
        """The clock by which the engine times its steps and queues; `Request.arrival_s` is on it, too."""
        ...

    @property
    def drafter_health(self) -> DrafterHealth:
        """The drafter's state; always ready if there is no remote one. Cheap; callable from any thread."""
        ...

    def submit(self, plan: SchedulerOutput) -> None:
        """Start a step; at most `info.max_in_flight` at once. EngineDeadError if a target's worker died."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step. Raises EngineDeadError if a target's worker has died."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError if a target's worker is gone. Cheap; callable from any thread."""
        ...

    def close(self) -> None:
        """End all workers and free their memory. Idempotent."""
        ...


class SwapsDrafters(Protocol):
    """An executor that can replace its drafter between two steps."""

    def swap_drafter(self, model: str) -> None: ...


@runtime_checkable
class HasWorkers(Protocol):
    """An executor with workers in separate processes. Its methods are thread-safe."""

    def stopped_workers(self) -> Sequence[str]: ...

    def kill_workers(self, reason: str) -> None:
        """Kill all workers, also stopped ones. The executor is dead afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class RuleLimits:
    """Capacity of an engine's tables per request: entries, and tokens of a bad word or reasoning mark."""

    allowed_tokens: int
    biased_tokens: int
    bad_words: int
    bad_word_tokens: int
    reasoning_tokens: int

    def excess(self, params: SamplingParams) -> tuple[str, str] | None:
        """Return a field that exceeds the limits, with a description; None if none does."""
        words, reasoning = params.bad_words_token_ids, (self.reasoning_tokens, "tokens")
        sizes = (
            ("allowed_token_ids", len(params.allowed_token_ids or ()), self.allowed_tokens, "tokens"),
            ("logit_bias", len(params.logit_bias), self.biased_tokens, "tokens"),
            ("bad_words", len(words), self.bad_words, "sequences of tokens"),
            ("bad_words", max(map(len, words), default=0), self.bad_word_tokens, "tokens in one word"),
            ("reasoning_start_token_ids", len(params.reasoning_start_token_ids), *reasoning),
            ("reasoning_end_token_ids", len(params.reasoning_end_token_ids), *reasoning),
        )
        excessive = (each for each in sizes if each[1] > each[2])
        return next(
            ((name, f"{count} {what}; at most {maximum}") for name, count, maximum, what in excessive), None
        )
