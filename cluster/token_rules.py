"""What a request changes in the logits before a token is chosen: bias, tokens that cannot be, penalties.

The values alone, as the workers need them: what they mean is `drafter/step/rules.py`. A request that asks for
nothing of it has none, and costs nothing. Made by `sequence.py`, carried by `plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """See `SamplingParams`.

    Attributes:
        prompt_length: tokens from this position on were generated.
        allowed_token_ids: all others are impossible; None allows all.
        bad_words: sequences of tokens; the last of one cannot follow the others, where these were generated.
        logit_bias: (token, what is added to its logit).
        repetition: the logit of a token of prompt or output is divided by it, or multiplied where negative.
        frequency: taken from a token's logit for each time it was generated.
        presence: taken from the logit of a token that was generated at all.
    """

    prompt_length: int
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams, prompt_length: int) -> TokenRules | None:
        """The rules of a request, None where it has none."""
        rules = cls(
            prompt_length=prompt_length,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=params.bad_words_token_ids,
            logit_bias=params.logit_bias,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
        return None if rules == cls(prompt_length=prompt_length) else rules

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on which tokens came before, and how often."""
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0


@dataclass(frozen=True, slots=True)
class RuleLimits:
    """What an engine's tables hold of one request's rules.

    Attributes:
        allowed_tokens, biased_tokens, bad_words: how many.
        bad_word_tokens: of one bad word.
    """

    allowed_tokens: int
    biased_tokens: int
    bad_words: int
    bad_word_tokens: int

    def excess(self, params: SamplingParams) -> tuple[str, str] | None:
        """The field that asks for more, and what would be right."""
        words = params.bad_words_token_ids
        asked = (
            ("allowed_token_ids", len(params.allowed_token_ids or ()), self.allowed_tokens, "tokens"),
            ("logit_bias", len(params.logit_bias), self.biased_tokens, "tokens"),
            ("bad_words", len(words), self.bad_words, "sequences of tokens"),
            ("bad_words", max(map(len, words), default=0), self.bad_word_tokens, "tokens in one word"),
        )
        over = (each for each in asked if each[1] > each[2])
        return next(((name, f"{count} {what}; at most {most}") for name, count, most, what in over), None)
