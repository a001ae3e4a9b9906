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
    SHARED_LABELS,
    STEP_TOKENS,
    Metric,
)

REQUEST_METRICS: tuple[Metric, ...] = (
    # Load.
    Metric("vllm:num_requests_running", "gauge", "requests", "Requests that are running."),
    Metric("vllm:num_requests_waiting", "gauge", "requests", "Requests that wait for a slot or for pages."),
    Metric(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "requests",
        "Waiting requests by reason. capacity: for a slot or pages; deferred: lines of batches, served last.",
        (*SHARED_LABELS, "reason"),
    ),
    Metric(
        "vllm:admission_rejections",
        "counter",
        "requests",
        "Requests that were not admitted, by reason. queue_full: max_num_queued_reqs wait; "
        "too_many_requests: the server's limit is reached; draining: the server stops; engine_dead: it is "
        "being replaced; key_limit: the API key's limit is reached.",
        (*SHARED_LABELS, "reason"),
    ),
    Metric(
        "vllm:engine_sleep_state",
        "gauge",
        "info",
        "1 for the engine's current state. Always awake: unused engines are stopped instead.",
        (*SHARED_LABELS, "sleep_state"),
    ),
    Metric("vllm:kv_cache_usage_perc", "gauge", "ratio", "Share of the K/V pages in use, 0 to 1."),
    # Tokens.
    Metric("vllm:prompt_tokens", "counter", "tokens", "Prompt tokens of requests that began to run."),
    Metric("vllm:generation_tokens", "counter", "tokens", "Generated tokens."),
    Metric(
        "vllm:request_success",
        "counter",
        "requests",
        "Requests that ended, by reason.",
        (*SHARED_LABELS, "finished_reason"),
    ),
    Metric(
        "vllm:iteration_tokens_total",
        "histogram",
        "tokens",
        "Tokens processed per step: computed prompt tokens and generated tokens.",
        buckets=STEP_TOKENS,
    ),
    Metric(
        "vllm:request_prompt_tokens",
        "histogram",
        "tokens",
        "Tokens per prompt.",
        buckets=REQUEST_TOKENS,
    ),
    Metric(
        "vllm:request_generation_tokens",
        "histogram",
        "tokens",
        "Generated tokens per completion.",
        buckets=REQUEST_TOKENS,
    ),
    Metric(
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "tokens",
        "Generated tokens of the longest completion of each prompt.",
        buckets=REQUEST_TOKENS,
    ),
    Metric(
        "vllm:request_params_n",
        "histogram",
        "requests",
        "Requested completions per prompt.",
        buckets=COMPLETIONS,
    ),
    Metric(
        "vllm:request_params_max_tokens",
        "histogram",
        "tokens",
        "Requested max_tokens per completion; no value if only the context is the limit.",
        buckets=REQUEST_TOKENS,
    ),
    # Latency.
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "seconds",
        "Time from arrival to the first token.",
        buckets=FIRST_TOKEN_S,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "seconds",
        "Time between tokens; tokens of one block share the time since the block before.",
        buckets=PER_TOKEN_S,
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "seconds",
        "Mean time per token after the first, per completion.",
        buckets=PER_TOKEN_S,
    ),
    Metric(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "seconds",
        "Time from arrival to the last token.",
        buckets=REQUEST_S,
    ),
    Metric(
        "vllm:request_queue_time_seconds",
        "histogram",
        "seconds",
        "Time from arrival until the request first ran.",
        buckets=REQUEST_S,
    ),
    Metric(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "seconds",
        "Time from when the request first ran to its first token.",
        buckets=REQUEST_S,
    ),
    Metric(
        "vllm:request_decode_time_seconds",
        "histogram",
        "seconds",
        "Time from the first token to the last one.",
        buckets=REQUEST_S,
    ),
    Metric(
        "vllm:request_inference_time_seconds",
        "histogram",
        "seconds",
        "Time from when the request first ran to its last token.",
        buckets=REQUEST_S,
    ),
    # Cache.
    Metric("vllm:prefix_cache_queries", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits", "counter", "tokens", "Prompt tokens found in the prefix cache."),
    Metric(
        "vllm:prompt_tokens_cached",
        "counter",
        "tokens",
        "Prompt tokens that were not computed; equals vllm:prefix_cache_hits.",
    ),
    Metric(
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "tokens",
        "Tokens of each prompt that were not in the prefix cache.",
        buckets=REQUEST_TOKENS,
    ),
    Metric(
        "vllm:num_preemptions",
        "counter",
        "preemptions",
        "Times that a running request lost its pages to another.",
    ),
    Metric(
        "vllm:kv_block_lifetime_seconds",
        "histogram",
        "seconds",
        "Time from a page's allocation to its eviction, for a sample of pages.",
        buckets=PAGE_S,
    ),
    Metric(
        "vllm:kv_block_idle_before_evict_seconds",
        "histogram",
        "seconds",
        "Time from a page's last use to its eviction, for a sample of pages. A short time means that the "
        "cache is too small.",
        buckets=PAGE_S,
    ),
    Metric(
        "vllm:kv_block_reuse_gap_seconds",
        "histogram",
        "seconds",
        "Time from a page's last use until it was reused, for a sample of pages.",
        buckets=PAGE_S,
    ),
    Metric(
        "vllm:cache_config_info",
        "gauge",
        "info",
        "Always 1; its labels describe the K/V cache. block_size: tokens per page; num_gpu_blocks: pages on "
        "any device.",
        (*SHARED_LABELS, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    ),
)
