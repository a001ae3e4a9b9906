"""The seam between deciding and doing: an `Executor` runs planned steps.

`SimulatedExecutor` (simulator.py) computes nothing; `actors/executor.py` holds the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .page_groups import PageGroup
from .plan import SchedulerOutput, StepResult
from .token_rules import RuleLimits


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What was learned while loading: the facts that the scheduler needs.

    Attributes:
        num_pages: pages of `page_size` tokens in each K/V pool.
        page_size: tokens per page.
        max_model_len: longest sequence, prompt and output, in tokens.
        vocab_size: token ids are below it.
        eos_token_ids: the model's end-of-sequence tokens.
        num_speculative_tokens: most drafts per request and step (block size - 1); 0 = plain decoding.
        dtype: of weights and K/V, e.g. "bfloat16".
        device: e.g. "cpu", "cuda".
        max_in_flight: steps that may be submitted before the first is collected; with 2 the scheduler plans
            the next step while the device computes one.
        max_stop_token_ids: most tokens that may end a request, the model's own included; None is no limit.
        has_logprobs: log probabilities may be asked for.
        rule_limits: most of a request's rules; None is no limit.
        page_groups: which layers see the same window, and from which pool their pages come.
    """

    num_pages: tuple[int, ...]
    page_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_speculative_tokens: int
    dtype: str
    device: str
    max_in_flight: int = 1
    max_stop_token_ids: int | None = None
    has_logprobs: bool = True
    rule_limits: RuleLimits | None = None
    page_groups: tuple[PageGroup, ...] = (PageGroup(),)


class Executor(Protocol):
    """Runs steps in the order of submission. Not thread-safe: one engine loop owns it."""

    @property
    def info(self) -> ExecutorInfo: ...

    def submit(self, plan: SchedulerOutput) -> None:
        """Start a step; at most `info.max_in_flight` at once. Raises EngineDeadError if a worker has died."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step submitted. Raises EngineDeadError when a worker has died."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone. Cheap; may be called from any thread."""
        ...

    def close(self) -> None:
        """End all workers and free their memory. Idempotent."""
        ...
