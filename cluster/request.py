"""What a user asks for: sampling parameters and a request. Not its progress: that is `sequence.py`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1  # what an int32 array of a step's plan holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Names and defaults are vLLM's.

    Attributes:
        n: completions per prompt; each gets a seed of its own.
        temperature: 0 is greedy; scales the logits before anything else.
        top_p: smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1].
        seed: keys the noise; drawn at random (and reported) if absent.
        stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the sequence, beside the model's end-of-sequence tokens.
        max_tokens: limit of generated tokens; None means up to the context's end.
        min_tokens: end-of-sequence and stop tokens are impossible before so many tokens.
        ignore_eos: the model's own end-of-sequence tokens do not end the sequence.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _require(1 <= self.n <= 128, "n", self.n, "an integer from 1 to 128")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "a number from 0 to 100")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "a number in (0, 1]")
        _require(
            -1 <= self.top_k <= MAX_COUNT, "top_k", self.top_k, "-1 or 0 (off) or a positive 32-bit integer"
        )
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "a number from 0 to 1")
        _require(
            self.seed is None or -(2**63) <= self.seed <= MAX_SEED,
            "seed",
            self.seed,
            "a 64-bit signed integer",
        )
        _require(all(self.stop), "stop", self.stop, "non-empty strings")
        _require(
            self.max_tokens is None or 1 <= self.max_tokens <= MAX_COUNT,
            "max_tokens",
            self.max_tokens,
            "at least 1 (and a 32-bit integer), or null",
        )
        _require(
            0 <= self.min_tokens <= MAX_COUNT,
            "min_tokens",
            self.min_tokens,
            "0 or more, and a 32-bit integer",
        )
        limit = self.max_tokens
        _require(
            limit is None or self.min_tokens <= limit,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({limit})",
        )
        _require(not self.stop or self.detokenize, "stop", self.stop, "empty, or detokenize=True")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def with_seed(self) -> SamplingParams:
        """The same parameters with a seed that is set (random if it was absent)."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(MAX_SEED))

    def child(self, index: int) -> SamplingParams:
        """Parameters of completion `index` of n: a seed of its own, derived from the parent's."""
        assert self.seed is not None, "derive children only from seeded parameters"
        if index == 0:
            return replace(self, n=1)
        digest = hashlib.blake2b(f"{self.seed}:{index}".encode(), digest_size=8).digest()
        return replace(self, n=1, seed=int.from_bytes(digest, "little") >> 1)


def _as_tuple(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise RequestError(f"{name}={value!r} is not allowed: it must be {wanted}.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued once (n = 1).

    Attributes:
        request_id: unique among living requests; every log line carries it.
        prompt_token_ids: the prompt, at least one token.
        params: seeded sampling parameters with n = 1 (`SamplingParams.with_seed`, `.child`).
        priority: lower runs earlier under the `priority` policy.
        arrival_s: monotonic time of arrival, seconds.
        cache_salt: isolates the prefix cache between users; None shares it.
        speculate: False decodes this request plainly; the tokens are the same.
        background: served behind every request that is not, in what those leave of the engine's time: it may
            wait for hours where they never pause. Counts before `priority`.
        output_token_ids: what was generated before, by another engine, with the same parameters and seed: the
            rest is what would have followed there. Counts towards `max_tokens` and `min_tokens`; no update
            brings it again.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival_s: float = field(default=0.0)
    cache_salt: str | None = None
    speculate: bool = True
    background: bool = False
    output_token_ids: tuple[int, ...] = ()
