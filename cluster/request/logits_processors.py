"""A request's changes to logits before sampling: bias, forbidden tokens, penalties.

Values only, as the workers need them; `drafter/step/inputs/logits_processors.py` applies them. A request
without any has no rules, at no cost. Made by `cluster/step/sequence.py`, carried by
`cluster/step/scheduler_output.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import SamplingParams


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Forces `end` after `budget` tokens of reasoning, which begins at `start` or with the answer."""

    budget: int
    start: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def of(cls, params: SamplingParams) -> ThinkingBudget | None:
        if params.thinking_token_budget is None:
            return None
        marks = params.reasoning_start_token_ids, params.reasoning_end_token_ids
        return cls(params.thinking_token_budget, *marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorParams:
    """A request's logits rules, see `SamplingParams`.

    Attributes:
        prompt_length: tokens from this position on were generated.
        allowed_token_ids: all others are impossible; None allows all.
        bad_words: token sequences; the last token cannot follow the others if these were generated.
        logit_bias: (token, value added to its logit).
        repetition: divides the logit of a token of prompt or output, or multiplies it if negative.
        frequency: subtracted from a token's logit for each time it was generated.
        presence: subtracted from the logit of a token that was generated.
        thinking: applied first; None if reasoning has no limit.
    """

    prompt_length: int
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    thinking: ThinkingBudget | None = None

    @classmethod
    def of(cls, params: SamplingParams, prompt_length: int) -> LogitsProcessorParams | None:
        rules = cls(
            prompt_length=prompt_length,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=params.bad_words_token_ids,
            logit_bias=params.logit_bias,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            thinking=ThinkingBudget.of(params),
        )
        return None if rules == cls(prompt_length=prompt_length) else rules

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on which tokens came before, and how often."""
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0


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
