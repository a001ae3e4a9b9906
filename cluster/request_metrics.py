"""The part of the catalogue that every server has: load, tokens, latency and caches, in vLLM's names.

Histograms of requests are of online ones, as they end; lines of batches are in the counters alone. What has n
completions counts n times, but for what is said to be of a prompt. vLLM's `lora_requests_info` is not among
them: vLLM itself shows it only where adapters are served. Part of `metrics.py`, where the whole stands.
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
    Metric("vllm:num_requests_running", "gauge", "requests", "Requests that run now."),
    Metric("vllm:num_requests_waiting", "gauge", "requests", "Requests that wait for a slot or for pages."),
    Metric(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "requests",
        "The same by reason. capacity: for a slot or pages; deferred: lines of batches, behind all others.",
        (*SHARED_LABELS, "reason"),
    ),
    Metric(
        "vllm:admission_rejections",
        "counter",
        "requests",
        "Requests that were not let in, by reason. queue_full: max_num_queued_reqs wait; too_many_requests: "
        "as many are here as may be; draining: the server stops; engine_dead: it is being replaced; "
        "key_limit: as many of the API key are under way as may be.",
        (*SHARED_LABELS, "reason"),
    ),
    Metric(
        "vllm:engine_sleep_state",
        "gauge",
        "info",
        "1 for the state that the engine is in. Always awake: an engine that is not needed ends.",
        (*SHARED_LABELS, "sleep_state"),
    ),
    Metric("vllm:kv_cache_usage_perc", "gauge", "ratio", "Share of the K/V pages in use, 0 to 1."),
    # Tokens.
    Metric("vllm:prompt_tokens", "counter", "tokens", "Prompt tokens of requests that began to run."),
    Metric("vllm:generation_tokens", "counter", "tokens", "Tokens that came out."),
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
        "Tokens by which a step got on: of prompts, and those that came out.",
        buckets=STEP_TOKENS,
    ),
    Metric(
        "vllm:request_prompt_tokens",
        "histogram",
        "tokens",
        "Of each prompt.",
        buckets=REQUEST_TOKENS,
    ),
    Metric(
        "vllm:request_generation_tokens",
        "histogram",
        "tokens",
        "That came out, per completion.",
        buckets=REQUEST_TOKENS,
    ),
    Metric(
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "tokens",
        "Of the longest completion of each prompt.",
        buckets=REQUEST_TOKENS,
    ),
    Metric(
        "vllm:request_params_n",
        "histogram",
        "requests",
        "Completions that were asked for, per prompt.",
        buckets=COMPLETIONS,
    ),
    Metric(
        "vllm:request_params_max_tokens",
        "histogram",
        "tokens",
        "Most tokens that were asked for, per completion; nothing where the context is the limit.",
        buckets=REQUEST_TOKENS,
    ),
    # Latency.
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "seconds",
        "From arrival to the first token.",
        buckets=FIRST_TOKEN_S,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "seconds",
        "Between tokens; tokens of one block share the time since the block before.",
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
        "From arrival to the last token.",
        buckets=REQUEST_S,
    ),
    Metric(
        "vllm:request_queue_time_seconds",
        "histogram",
        "seconds",
        "From arrival until the request first ran.",
        buckets=REQUEST_S,
    ),
    Metric(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "seconds",
        "From when the request first ran to its first token.",
        buckets=REQUEST_S,
    ),
    Metric(
        "vllm:request_decode_time_seconds",
        "histogram",
        "seconds",
        "From the first token to the last one.",
        buckets=REQUEST_S,
    ),
    Metric(
        "vllm:request_inference_time_seconds",
        "histogram",
        "seconds",
        "From when the request first ran to its last token.",
        buckets=REQUEST_S,
    ),
    # Cache.
    Metric("vllm:prefix_cache_queries", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits", "counter", "tokens", "Prompt tokens found in the prefix cache."),
    Metric(
        "vllm:prompt_tokens_cached",
        "counter",
        "tokens",
        "Prompt tokens that were not computed: vllm:prefix_cache_hits, by vLLM's other name.",
    ),
    Metric(
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "tokens",
        "Tokens of each prompt that the prefix cache did not have.",
        buckets=REQUEST_TOKENS,
    ),
    Metric(
        "vllm:num_preemptions", "counter", "preemptions", "Times a running request gave its pages to another."
    ),
    Metric(
        "vllm:kv_block_lifetime_seconds",
        "histogram",
        "seconds",
        "From when a page was taken until its content made room, of a sample of pages.",
        buckets=PAGE_S,
    ),
    Metric(
        "vllm:kv_block_idle_before_evict_seconds",
        "histogram",
        "seconds",
        "From when it was last in use until then. Short: what could be found again is soon gone.",
        buckets=PAGE_S,
    ),
    Metric(
        "vllm:kv_block_reuse_gap_seconds",
        "histogram",
        "seconds",
        "From when a page was last in use until it was found again, of a sample of pages.",
        buckets=PAGE_S,
    ),
    Metric(
        "vllm:cache_config_info",
        "gauge",
        "info",
        "1; its labels say how K/V is kept. block_size: tokens of a page; num_gpu_blocks: pages, anywhere.",
        (*SHARED_LABELS, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    ),
)
