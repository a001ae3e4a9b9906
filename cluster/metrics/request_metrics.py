"""The part of the catalogue that every server has: load, tokens, latency and caches, with vLLM's names.

Histograms are of online requests, when they end; lines of batches are only in the counters. A request with n
completions counts n times, except in metrics per prompt. vLLM's `lora_requests_info` is missing, as vLLM
itself only exports it where adapters are served. Part of the catalogue in `engine_metrics.py`.
"""

from __future__ import annotations

from .metric import (
    COMPLETIONS,
    FIRST_TOKEN_S,
    PAGE_S,
    PER_TOKEN_S,
    REQUEST_S,
    REQUEST_TOKENS,
    STEP_TOKENS,
    Metric,
    counter,
    gauge,
    histogram,
)

REQUEST_METRICS: tuple[Metric, ...] = (
    # Load.
    gauge("vllm:num_requests_running", "requests", "Requests that are running.", stat="running"),
    gauge(
        "vllm:num_requests_waiting", "requests", "Requests that wait for a slot or for pages.", stat="waiting"
    ),
    gauge(
        "vllm:num_requests_waiting_by_reason",
        "requests",
        "Waiting requests by reason. capacity: for a slot or pages; deferred: lines of batches, served last.",
        "reason",
    ),
    counter(
        "vllm:admission_rejections",
        "requests",
        "Requests that were not admitted, by reason. queue_full: max_num_queued_reqs wait; "
        "too_many_requests: the server's limit is reached; draining: the server stops; engine_dead: it is"
        " being replaced; key_limit: the API key's limit is reached.",
        "reason",
    ),
    gauge(
        "vllm:engine_sleep_state",
        "info",
        "1 for the engine's current state. Always awake: unused engines are stopped instead.",
        "sleep_state",
    ),
    gauge("vllm:kv_cache_usage_perc", "ratio", "Share of the K/V pages in use, 0 to 1.", stat="kv_usage"),
    # Tokens.
    counter(
        "vllm:prompt_tokens", "tokens", "Prompt tokens of requests that began to run.", stat="prompt_tokens"
    ),
    counter("vllm:generation_tokens", "tokens", "Generated tokens.", stat="generation_tokens"),
    counter(
        "vllm:request_success",
        "requests",
        "Requests that ended, by reason.",
        "finished_reason",
        stat="finished",
    ),
    histogram(
        "vllm:iteration_tokens_total",
        "tokens",
        "Tokens processed per step: computed prompt tokens and generated tokens.",
        STEP_TOKENS,
        stat="step_tokens",
    ),
    histogram("vllm:request_prompt_tokens", "tokens", "Tokens per prompt.", REQUEST_TOKENS),
    histogram("vllm:request_generation_tokens", "tokens", "Generated tokens per completion.", REQUEST_TOKENS),
    histogram(
        "vllm:request_max_num_generation_tokens",
        "tokens",
        "Generated tokens of the longest completion of each prompt.",
        REQUEST_TOKENS,
    ),
    histogram("vllm:request_params_n", "requests", "Requested completions per prompt.", COMPLETIONS),
    histogram(
        "vllm:request_params_max_tokens",
        "tokens",
        "Requested max_tokens per completion; no value if only the context is the limit.",
        REQUEST_TOKENS,
    ),
    # Latency.
    histogram(
        "vllm:time_to_first_token_seconds", "seconds", "Time from arrival to the first token.", FIRST_TOKEN_S
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        "seconds",
        "Time between tokens; tokens of one block share the time since the block before.",
        PER_TOKEN_S,
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "seconds",
        "Mean time per token after the first, per completion.",
        PER_TOKEN_S,
    ),
    histogram(
        "vllm:e2e_request_latency_seconds", "seconds", "Time from arrival to the last token.", REQUEST_S
    ),
    histogram(
        "vllm:request_queue_time_seconds",
        "seconds",
        "Time from arrival until the request first ran.",
        REQUEST_S,
    ),
    histogram(
        "vllm:request_prefill_time_seconds",
        "seconds",
        "Time from when the request first ran to its first token.",
        REQUEST_S,
    ),
    histogram(
        "vllm:request_decode_time_seconds", "seconds", "Time from the first token to the last one.", REQUEST_S
    ),
    histogram(
        "vllm:request_inference_time_seconds",
        "seconds",
        "Time from when the request first ran to its last token.",
        REQUEST_S,
    ),
    # Cache.
    counter(
        "vllm:prefix_cache_queries",
        "tokens",
        "Prompt tokens looked up in the prefix cache.",
        stat="prefix_cache_queries",
    ),
    counter(
        "vllm:prefix_cache_hits",
        "tokens",
        "Prompt tokens found in the prefix cache.",
        stat="prefix_cache_hits",
    ),
    counter(
        "vllm:external_prefix_cache_queries",
        "tokens",
        "Prompt tokens looked up in the tier below the prefix cache (kv_tier_path).",
        stat="tier_queries",
    ),
    counter(
        "vllm:external_prefix_cache_hits",
        "tokens",
        "Prompt tokens read from the tier below the prefix cache; they also count as its hits.",
        stat="tier_hits",
    ),
    counter(
        "vllm:prompt_tokens_cached",
        "tokens",
        "Prompt tokens that were not computed; equals vllm:prefix_cache_hits.",
        stat="prefix_cache_hits",
    ),
    histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "tokens",
        "Tokens of each prompt that were not in the prefix cache.",
        REQUEST_TOKENS,
    ),
    counter(
        "vllm:num_preemptions",
        "preemptions",
        "Times that a running request lost its pages to another.",
        stat="preemptions",
    ),
    histogram(
        "vllm:kv_block_lifetime_seconds",
        "seconds",
        "Time from a page's allocation to its eviction, for a sample of pages.",
        PAGE_S,
        stat="page_lifetimes",
    ),
    histogram(
        "vllm:kv_block_idle_before_evict_seconds",
        "seconds",
        "Time from a page's last use to its eviction, for a sample of pages. A short time means that the "
        "cache is too small.",
        PAGE_S,
        stat="page_idle_times",
    ),
    histogram(
        "vllm:kv_block_reuse_gap_seconds",
        "seconds",
        "Time from a page's last use until it was reused, for a sample of pages.",
        PAGE_S,
        stat="page_reuse_gaps",
    ),
    gauge(
        "vllm:cache_config_info",
        "info",
        "Always 1; its labels describe the K/V cache. block_size: tokens per page; num_gpu_blocks: pages "
        "on any device.",
        *("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    ),
)
