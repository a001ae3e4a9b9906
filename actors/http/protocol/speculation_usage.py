"""`metrics.speculative_decoding` of a response: acceptance in vLLM's format, and our trace.

    "speculative_decoding": {"mean_acceptance_length": 2.5, ..,       vLLM's `summary`
                             "per_step_accepted": [1, 2],             vLLM's `detailed`: of verify steps
                             "per_step_drafted": [3, 3],
                             "trace": {"first_token": 0,              if the request asks for it
                                       "origins": ["plain", "draft", "bonus", "draft", "draft", "bonus"],
                                       "steps": [0, 1, 1, 2, 2, 2],
                                       "truncated": false}}

A trace has an entry per token of the answer: its origin, and the index of its step among all steps that
produced tokens, including plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ...engine.output_processor import RequestMetrics
from ...engine.request_spec_stats import TracedStep, token_origins
from ...system.atomic_files import rounded
from ..wire.json_io import JsonObject

MAX_TRACED_TOKENS = 16_384  # about 200 kB of JSON


def acceptance(
    cost: RequestMetrics, num_spec_tokens: int, *, detailed: bool, first_traced: int | None = None
) -> JsonObject:
    """Return the object for a request with one completion.

    The histogram is dense: index = accepted drafts without the bonus token, 0..num_spec_tokens (most drafts
    per step). `detailed` includes each verify step; `first_traced`, a trace of the answer from this token on.
    """
    histogram = cost.acceptance_histogram + [0] * (num_spec_tokens + 1 - len(cost.acceptance_histogram))
    drafted, trace = cost.num_draft_tokens, cost.trace or ()
    verified = [step for step in trace if step.num_drafted]
    found: JsonObject = {
        # Numbers even if nothing was drafted: vLLM's format has them, and clients check it.
        "mean_acceptance_length": rounded(cost.mean_acceptance_length or 1.0),
        "draft_acceptance_rate": rounded(cost.num_accepted_tokens / drafted) if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": cost.num_steps,
        "num_accepted_draft_tokens": cost.num_accepted_tokens,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
        "per_step_accepted": [step.num_accepted for step in verified] if detailed else None,
        "per_step_drafted": [step.num_drafted for step in verified] if detailed else None,
    }
    return found if first_traced is None else {**found, "trace": _trace(trace, first_traced)}


def _trace(steps: Sequence[TracedStep], first_token: int) -> JsonObject:
    origins = list(islice(token_origins(steps), MAX_TRACED_TOKENS))
    return {
        "first_token": first_token,
        "origins": [origin for _, origin in origins],
        "steps": [number for number, _ in origins],
        "truncated": sum(step.num_tokens for step in steps) > len(origins),
    }
