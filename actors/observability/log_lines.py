"""The two periodic log lines about an engine's activity, in vLLM's wording.

Written by `telemetry.py`, from two snapshots.
"""

from __future__ import annotations

from ...cluster.engine.engine_core import EngineStats
from ...cluster.speculation.acceptance_length import mean_acceptance_length


def engine_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    prompts = now.prompt_tokens - before.prompt_tokens
    tokens = now.generation_tokens - before.generation_tokens
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    return (
        f"Engine 000: Avg prompt throughput: {prompts / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {tokens / seconds:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
        f"KV cache usage: {100 * now.kv_usage:.1f}%, "
        f"Prefix cache hit rate: {100 * hits / queries if queries else 0:.1f}%"
    )


def acceptance_line(before: EngineStats, now: EngineStats, seconds: float, speedup: float | None) -> str:
    drafts = now.num_drafts - before.num_drafts
    drafted = now.num_draft_tokens - before.num_draft_tokens
    accepted = now.num_accepted_tokens - before.num_accepted_tokens
    length = mean_acceptance_length(drafts, accepted)
    assert length is not None, "there are drafts between the snapshots"
    earlier = [*before.accepted_per_pos, *[0] * len(now.accepted_per_pos)]
    rates = [(a - b) / drafts for a, b in zip(now.accepted_per_pos, earlier, strict=False)]
    return (
        f"SpecDecoding metrics: Mean acceptance length: {length:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted if drafted else 0:.1f}%"
        + (f", Measured speed-up: {speedup:.2f}x" if speedup is not None else "")
    )
