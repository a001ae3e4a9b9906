"""Limits of an engine's work, derived once from settings and facts, and the checks of requests against them.

`cluster/scheduler/scheduler.py` reads `SchedulerConfig`; `cluster/engine/engine_core.py` calls
`check_request` before anything is queued.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import EngineConfig
from ..errors import RequestError, UnprocessableError, brief
from ..pages.kv_cache_groups import KVCacheGroup, longest_sequence
from ..request.request import Request, SamplingParams
from .draft_shape import DraftShape
from .executor import ExecutorInfo, RuleLimits
from .page_transfer import KVTierInfo


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's settings, derived from the engine's and from facts learned while loading.

    Attributes:
        num_slots: most sequences that run at once; no more than rows, so that each gets one in every step.
        max_rows: the token budget of a step.
        by_priority: whether `Request.priority` counts.
        adaptive_drafts: whether draft lengths follow the measured benefit.
        halves: whether one half of the requests can be drafted while the other is verified.
        max_length: longest sequence within max_model_len that the pages hold.

    The rest is as in `EngineConfig` and `ExecutorInfo`.
    """

    num_slots: int
    max_rows: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    by_priority: bool
    num_pages: tuple[int, ...]
    num_states: int | None
    page_groups: tuple[KVCacheGroup, ...]
    page_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_speculative_tokens: int
    draft_shape: DraftShape
    adaptive_drafts: bool
    halves: bool
    row_buckets: tuple[int, ...] | None
    max_stop_token_ids: int | None
    has_grammars: bool
    rule_limits: RuleLimits | None
    kv_tier: KVTierInfo | None = None
    max_length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pages = (self.page_groups, self.num_pages, self.page_size, self.max_rows)
        object.__setattr__(self, "max_length", longest_sequence(*pages, self.max_model_len))

    @property
    def max_drafts(self) -> int:
        """Most drafts of a request in a step."""
        return self.draft_shape.most_drafts(self.num_speculative_tokens)

    @classmethod
    def derive(cls, config: EngineConfig, info: ExecutorInfo) -> SchedulerConfig:
        max_rows = config.max_num_batched_tokens or info.max_num_batched_tokens
        return cls(
            num_slots=min(config.max_num_seqs, max_rows),
            max_rows=max_rows,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_prefix_caching=config.enable_prefix_caching,
            by_priority=config.scheduling_policy == "priority",
            num_pages=info.num_pages,
            num_states=info.num_states,
            page_groups=info.page_groups,
            page_size=info.page_size,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            num_speculative_tokens=info.num_speculative_tokens,
            draft_shape=info.draft_shape,
            adaptive_drafts=config.speculative_config is not None and config.speculative_config.adaptive,
            halves=info.halves,
            row_buckets=info.row_buckets,
            max_stop_token_ids=info.max_stop_token_ids,
            has_grammars=info.has_grammars,
            rule_limits=info.rule_limits,
            kv_tier=info.kv_tier,
        )


def check_request(request: Request, limits: SchedulerConfig) -> None:
    """Raise RequestError if the request can never be served; names the field and what would be right."""
    prompt, params = request.prompt_token_ids, request.params
    assert params.n == 1, "SamplingParams.child() splits n completions before the engine"
    length = len(prompt)
    if length == 0:
        raise RequestError("The prompt is empty; it must have at least one token.", param="prompt")
    check_vocabulary("prompt", prompt, limits.vocab_size)
    check_vocabulary("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_rules(params, limits)
    num_stops = len({*params.stop_token_ids, *limits.eos_token_ids})
    if limits.max_stop_token_ids is not None and num_stops > limits.max_stop_token_ids:
        raise RequestError(
            f"stop_token_ids and the model's end tokens are {num_stops} tokens; this engine checks at "
            f"most {limits.max_stop_token_ids}. Give fewer, or set attention_backend to torch.",
            param="stop_token_ids",
        )
    if length + 1 > limits.max_model_len:
        raise prompt_too_long(length, limits.max_model_len)
    if not limits.enable_chunked_prefill and length > limits.max_rows:
        raise RequestError(
            f"The prompt has {length} tokens; without chunked prefill it must fit a step of "
            f"max_num_batched_tokens={limits.max_rows}. Shorten it, or enable chunked prefill.",
            param="prompt",
        )
    needed = min(length + (params.max_tokens or len(request.output_token_ids) + 1), limits.max_model_len)
    if needed > limits.max_length:
        raise UnprocessableError(
            f"The prompt has {length} tokens and max_tokens={brief(params.max_tokens)}: {needed} tokens, but "
            f"the K/V pages hold {limits.max_length}. Lower max_tokens, shorten the prompt, or raise "
            "kv_cache_memory_bytes.",
            param="max_tokens" if length + 1 <= limits.max_length else "prompt",
        )


def check_output_so_far(request: Request, limits: SchedulerConfig) -> None:
    """Raise RequestError if nothing can follow the previous output; call after `check_request`."""
    tokens, params = request.output_token_ids, request.params
    if not tokens:
        return
    check_vocabulary("output_token_ids", tokens, limits.vocab_size)
    room = limits.max_length - len(request.prompt_token_ids)
    maximum = min(params.max_tokens or room, room)
    if len(tokens) >= maximum:
        raise RequestError(
            f"output_token_ids holds {len(tokens)} tokens; by max_tokens={brief(params.max_tokens)} and "
            f"the longest sequence this request ends with {maximum}: nothing is left to generate. Take "
            "them as "
            "its output.",
            param="output_token_ids",
        )
    ends = {*params.stop_token_ids, *(limits.eos_token_ids if params.ends_at_eos else ())}
    for index in range(params.min_tokens, len(tokens)):
        if tokens[index] in ends:
            raise RequestError(
                f"output_token_ids[{index}]={tokens[index]} is a stop token and ended this request: nothing "
                "is left to generate. Take the tokens up to it as its output.",
                param="output_token_ids",
            )


def _check_rules(params: SamplingParams, limits: SchedulerConfig) -> None:
    if params.structured_outputs is not None or params.grammar is not None:
        _check_grammar(params, limits)
    excess = limits.rule_limits and limits.rule_limits.excess(params)
    if excess:
        raise RequestError(
            f"{excess[0]}: {excess[1]} in this engine. Give fewer, or set attention_backend to torch.",
            param=excess[0],
        )
    check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), limits.vocab_size)
    check_vocabulary("logit_bias", tuple(token_id for token_id, _ in params.logit_bias), limits.vocab_size)
    _check_thinking(params, limits)
    for word in params.bad_words_token_ids:
        check_vocabulary("bad_words_token_ids", word, limits.vocab_size)
    if params.bad_words and not params.bad_words_token_ids:
        raise RequestError(
            "bad_words: this engine runs without a tokenizer (skip_tokenizer_init). Give "
            "bad_words_token_ids.",
            param="bad_words",
        )


def _check_grammar(params: SamplingParams, limits: SchedulerConfig) -> None:
    field = "grammar" if params.structured_outputs is None else params.structured_outputs.field
    if not limits.has_grammars or params.grammar is None:
        raise RequestError(
            f"{field}: this engine cannot hold an answer to a grammar: it runs without a tokenizer "
            "(skip_tokenizer_init), its model names no end-of-sequence token, or llguidance does not support "
            "its tokenizer. Leave it out.",
            param=field,
        )


def _check_thinking(params: SamplingParams, limits: SchedulerConfig) -> None:
    if params.thinking_token_budget is None:
        return
    start, end = params.reasoning_start_token_ids, params.reasoning_end_token_ids
    if not end:
        raise RequestError(
            "thinking_token_budget: it is not known how this model's reasoning ends. Leave it out, or give "
            "reasoning_end_token_ids (over HTTP: start the server with a reasoning parser).",
            param="thinking_token_budget",
        )
    check_vocabulary("reasoning_start_token_ids", start, limits.vocab_size)
    check_vocabulary("reasoning_end_token_ids", end, limits.vocab_size)
    if params.min_tokens and {*end} & {*params.stop_token_ids, *limits.eos_token_ids}:
        raise RequestError(
            f"min_tokens={params.min_tokens} forbids tokens that end the answer, and reasoning ends with one "
            "of them. Leave out min_tokens, or thinking_token_budget.",
            param="min_tokens",
        )


def prompt_too_long(length: int | str, max_model_len: int, param: str = "prompt") -> RequestError:
    return RequestError(
        f"The prompt has {length} tokens; with one to generate it must fit max_model_len={max_model_len}. "
        "Shorten it, or raise max_model_len.",
        param=param,
    )


def check_max_tokens(
    prompt_tokens: int, limit: int | None, max_model_len: int, param: str = "max_tokens"
) -> None:
    """Raise RequestError if the user's `limit` of generated tokens, if any, exceeds the context."""
    if limit is not None and prompt_tokens + limit > max_model_len:
        raise RequestError(
            f"{param}={brief(limit)} and a prompt of {prompt_tokens} tokens are {prompt_tokens + limit} "
            f"tokens, more than this model's context of {max_model_len} (max_model_len). Ask for at most "
            f"{max_model_len - prompt_tokens}, or leave {param} out for what is left.",
            param=param,
        )


def check_vocabulary(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise RequestError(f"{field} holds token {wrong}; tokens are 0 to {vocab_size - 1}.", param=field)
