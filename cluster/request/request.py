"""Sampling parameters and requests, as users send them. `cluster/step/sequence.py` has the progress.

`LogitsProcessorParams` are a request's changes to logits before sampling, as the workers need them;
`drafter/step/inputs/logits_processors.py` applies them. A request without any has none, at no cost.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypedDict, cast

from ..errors import RequestError, brief
from .structured_outputs import Grammar, StructuredOutputsParams

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1  # the maximum of an int32 array of a step's plan
MAX_BAD_WORDS = 1024
MAX_LOGPROBS = 20  # most likely tokens per position


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names and defaults.

    Attributes:
        n: completions per prompt; each gets a seed of its own.
        temperature: 0 is greedy. Scales the logits before anything else.
        top_p: smallest set of tokens with probabilities that sum to at least this, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1].
        seed: seed of the noise; drawn at random if absent (dataset results have it in the column `seed`).
        stop: strings that end the text (on the command line the flag may be repeated). They are not part of
            it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the sequence, in addition to the model's end-of-sequence tokens.
        max_tokens: most tokens to generate; None means up to the context's end; commands and rows of a
            dataset take 256 by default. OpenAI batch lines have OpenAI's own default.
        min_tokens: end-of-sequence and stop tokens are impossible before this many tokens.
        ignore_eos: the model's own end-of-sequence tokens do not end the sequence.
        skip_special_tokens: leave special tokens out of the text, except for `kept_special_token_ids`.
        detokenize: whether to convert tokens to text.
        presence_penalty: subtracted once from the logit of every generated token; from -2 to 2.
        frequency_penalty: subtracted from the logit of a token for each time it was generated; from -2 to 2.
        repetition_penalty: divides the logit of every token of prompt and output (multiplies it where it is
            negative); above 0, 1 is none.
        logit_bias: {token id: value added to its logit}, from -100 to 100; stored as pairs.
        allowed_token_ids: no other token can be generated; None allows all.
        bad_words: strings that cannot be generated; needs a tokenizer, which makes them token ids.
        bad_words_token_ids: the same as token ids.
        logprobs: return the log probability of each generated token, and of this many most likely tokens at
            its position, from the model's own distribution before temperature and all else. None for none.
        prompt_logprobs: as `logprobs`, for each token of the prompt but the first. Such a prompt is computed
            completely, without the prefix cache, which holds no logits.
        thinking_token_budget: force the end of reasoning after this many tokens; None for no limit.
        reasoning_start_token_ids, reasoning_end_token_ids: the tokens around reasoning; by default the
            model's own (from its chat template). Without a start, reasoning begins with the answer.
        structured_outputs: constraints on the text; needs a tokenizer, which makes them the `grammar`.
        grammar: the same, checked; `ignore_eos` has no effect with it, as the grammar determines where the
            text can end.
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
    kept_special_token_ids: tuple[int, ...] = ()
    detokenize: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    reasoning_start_token_ids: tuple[int, ...] = ()
    reasoning_end_token_ids: tuple[int, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Give each field its type. Raises RequestError for a value of another type or out of bounds."""
        for names, read in _READERS:
            for name in names:
                object.__setattr__(self, name, read(name, getattr(self, name)))
        limit = self.max_tokens
        _require(
            limit is None or self.min_tokens <= limit,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({limit})",
        )
        _require(not self.stop or self.detokenize, "stop", self.stop, "empty, or detokenize=True")
        for token_id, bias in self.logit_bias:
            _require(-100.0 <= bias <= 100.0, f"logit_bias.{token_id}", bias, "a number from -100 to 100")
        _require(self.allowed_token_ids != (), "allowed_token_ids", [], "at least one token id, or null")
        for name, maximum in (("bad_words", MAX_BAD_WORDS), ("bad_words_token_ids", 2 * MAX_BAD_WORDS)):
            count = len(getattr(self, name))
            _require(
                count <= maximum, name, getattr(self, name), f"a list of at most {maximum}, not of {count}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def ends_at_eos(self) -> bool:
        return not self.ignore_eos or self.grammar is not None

    def with_seed(self, seed: int | None = None) -> SamplingParams:
        """Return these parameters with a seed: their own, or else the given one, or else a random one."""
        if self.seed is not None:
            return self
        return self._copy_with(seed=secrets.randbelow(MAX_SEED) if seed is None else seed)

    def child(self, index: int) -> SamplingParams:
        """Return the parameters of completion `index` of n, with a seed derived from the parent's."""
        assert self.seed is not None, "derive children only from seeded parameters"
        if index == 0:
            return self._copy_with(n=1)
        digest = hashlib.blake2b(f"{self.seed}:{index}".encode(), digest_size=8).digest()
        return self._copy_with(n=1, seed=int.from_bytes(digest, "little") >> 1)

    def _copy_with(self, **changes: int) -> SamplingParams:
        """Return a copy with other, valid values, without checking long lists again for each completion."""
        copy = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(copy, name, changes.get(name, getattr(self, name)))
        return copy


# Below, Any is what a user gave for a field.
# Field: bounds, and the message's text for other values; null is accepted where that says so.
_ABOVE_0 = math.nextafter(0.0, 1.0)
_INTEGERS: Mapping[str, tuple[int, int, str]] = {
    "n": (1, 128, "an integer from 1 to 128"),
    "top_k": (-1, MAX_COUNT, "-1 or 0 (off) or a positive 32-bit integer"),
    "seed": (-(2**63), MAX_SEED, "a 64-bit signed integer, or null"),
    "max_tokens": (1, MAX_COUNT, "at least 1 (and a 32-bit integer), or null"),
    "min_tokens": (0, MAX_COUNT, "0 or more, and a 32-bit integer"),
    "logprobs": (0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or null"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or null"),
    "thinking_token_budget": (0, MAX_COUNT, "0 or more (and a 32-bit integer), or null"),
}
_NUMBERS: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "a number from 0 to 100"),
    "top_p": (_ABOVE_0, 1.0, "a number in (0, 1]"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "presence_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "repetition_penalty": (_ABOVE_0, 100.0, "a number above 0, at most 100"),
}
_FORMS = {"structured_outputs": StructuredOutputsParams, "grammar": Grammar}


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number; numpy's types count, booleans do not."""
    return _is_number(value) and cast("float", value) % 1 == 0


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _integer(name: str, value: Any) -> int | None:
    low, high, wanted = _INTEGERS[name]
    if cast(object, value) is None and wanted.endswith("or null"):
        return None
    _require(is_integer(value) and low <= value <= high, name, value, wanted)
    return int(value)


def _number(name: str, value: Any) -> float:
    low, high, wanted = _NUMBERS[name]
    _require(_is_number(value) and low <= value <= high, name, value, wanted)
    return float(value)


def _flag(name: str, value: Any) -> bool:
    _require(isinstance(value, bool), name, value, "true or false")
    return value


def _form(name: str, value: Any) -> object:
    form = _FORMS[name]
    _require(value is None or isinstance(value, form), name, value, f"a {form.__name__}, or None")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _elements(name, value, "a list of strings")
    _require(all(each and isinstance(each, str) for each in texts), name, value, "non-empty strings")
    return texts


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _elements(name, value, "a list of token ids")
    if set(map(type, ids)) <= {int}:  # a list may be long
        return ids
    _require(all(map(is_integer, ids)), name, value, "a list of token ids, which are integers")
    return tuple(map(int, ids))


def _allowed_ids(name: str, value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(dict.fromkeys(_token_ids(name, value)))


def _sequences_of_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    found = tuple(_token_ids(name, each) for each in _elements(name, value, "a list of lists of token ids"))
    _require(all(found), name, value, "sequences of token ids, none empty")
    return found


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs by token id; of a mapping (its keys may be digits as in JSON), or of pairs."""
    wanted, found = "a mapping of token ids to numbers, or null", list[tuple[int, float]]()
    items = cast("Mapping[Any, Any]", value).items() if isinstance(cast(object, value), Mapping) else value
    for token_id, bias in map(_pair, _elements(name, items, wanted)):
        is_id = is_integer(token_id) or (isinstance(token_id, str) and token_id.lstrip("-").isdecimal())
        _require(is_id and _is_number(bias), name, value, wanted)
        found.append((int(token_id), float(bias)))
    return tuple(sorted(found))


def _pair(value: Any) -> tuple[Any, Any]:
    try:
        first, second = value
    except (TypeError, ValueError):
        return None, None
    return first, second


def _elements(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    """Return the elements of a field that takes several; none for None."""
    if value is None:
        return ()
    try:
        found = None if isinstance(cast(object, value), str | bytes | Mapping) else tuple(value)
    except TypeError:
        found = None
    _require(found is not None, name, value, wanted)
    return found or ()


_READERS: Sequence[tuple[Iterable[str], Callable[[str, Any], object]]] = (
    (_INTEGERS, _integer),
    (_NUMBERS, _number),
    (("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"), _flag),
    (("stop", "bad_words"), _texts),
    (("stop_token_ids", "kept_special_token_ids"), _token_ids),
    (("reasoning_start_token_ids", "reasoning_end_token_ids"), _token_ids),
    (("allowed_token_ids",), _allowed_ids),
    (("bad_words_token_ids",), _sequences_of_ids),
    (("logit_bias",), _biases),
    (_FORMS, _form),
)


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise RequestError(f"{name}={brief(value)} is not allowed: it must be {wanted}.", param=name)


class SpeculationOptions(TypedDict, total=False):
    """Fields of `Request` that bound its drafts."""

    max_draft_tokens: int | None
    tpot_ms: float | None
    adaptive_drafts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue once (n = 1).

    Attributes:
        request_id: unique among live requests; every log line has it.
        prompt_token_ids: the prompt, at least one token.
        params: seeded sampling parameters with n = 1 (`SamplingParams.with_seed`, `.child`).
        priority: lower runs earlier under the `priority` policy.
        arrival_s: monotonic time of arrival, seconds.
        cache_salt: isolates the prefix cache between users; None shares it.
        max_draft_tokens: most drafts per step, if lower than the engine's; 0 decodes this request plainly,
            None has no limit. The tokens are the same.
        tpot_ms: desired upper bound of the mean milliseconds per output token. While the request is slower,
            its drafts are preferred to those of others; while it is much faster, others' are preferred. None
            for no preference. The tokens are the same.
        adaptive_drafts: False drafts as much as allowed in every step, also where the engine expects no gain,
            while all running requests say so: for demonstrations. The tokens are the same.
        background: served after all other requests, in the time that they leave: it may wait for hours. Takes
            precedence over `priority`.
        output_token_ids: output that another engine generated before with the same parameters and seed; the
            rest is what would have followed there. Counts towards `max_tokens` and `min_tokens`; no update
            repeats it.
        client_id: the sender's name for the request, if different.
        uses_cache: False computes the whole prompt, and caches no page.
        owner: owner of the request's key (`caller.py`), which may query its timeline; None without a key.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival_s: float = field(default=0.0)
    cache_salt: str | None = None
    max_draft_tokens: int | None = None
    tpot_ms: float | None = None
    adaptive_drafts: bool = True
    background: bool = False
    output_token_ids: tuple[int, ...] = ()
    client_id: str | None = None
    owner: str | None = None
    uses_cache: bool = True

    def __post_init__(self) -> None:
        limit = self.max_draft_tokens
        fits = limit is None or (is_integer(limit) and limit >= 0)
        _require(fits, "max_draft_tokens", limit, "an integer, 0 or more, or null")
        target = self.tpot_ms
        fits = target is None or (_is_number(target) and 0 < target < math.inf)
        _require(fits, "tpot_ms", target, "a number above 0 (and finite), or null")

    def max_drafts(self, engine_max: int) -> int:
        limits = [engine_max]
        if self.max_draft_tokens is not None:
            limits.append(self.max_draft_tokens)
        if self.params.grammar is not None:
            limits.append(self.params.grammar.max_drafts)
        return min(limits)


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
