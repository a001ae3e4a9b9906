"""GET /explain?id=...: the timeline of a request, step by step, for the key that sent it. No text, no tokens.

The id is the response's or the client's own (X-Request-Id). The engine keeps the timelines of its last
requests (`cluster/records/flight_recorder.py`); a gateway queries all of its replicas.

GET /explain without an id: acceptance of those requests by slice (temperature, context, prefix cache, grammar
and key), against the drafter's card, and the likely causes of low acceptance that these slices show. `manta
drafter explain` also knows texts, and tests the pair.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fastapi import APIRouter, Request, Response

from ....cluster.errors import NotFoundError, brief
from ....cluster.records.acceptance_slices import report_acceptance
from ....cluster.records.low_acceptance import PairEvidence, likely_causes
from ....cluster.records.request_timeline import RequestTimeline, SlotInterval, TimelineStep
from ....cluster.request.caller import Caller
from ....cluster.speculation.acceptance_length import survival_of_length
from ....drafter.card import card_lengths
from ...engine.async_engine import AsyncEngine
from ..middleware.api_keys import caller_of
from ..wire.json_io import JsonObject, json_response

PATH = "/explain"


def explain_routes(engine: AsyncEngine, replica: str) -> APIRouter:
    router = APIRouter()

    @router.get(PATH)
    async def explain(http: Request, id: str | None = None) -> Response:
        """Return the timeline of a request of this key; an admin key may query all requests.

        Without an id: acceptance by slice of the recent requests, and likely causes of a low one.
        """
        caller = caller_of(http.scope)
        if id is None:
            found = await asyncio.to_thread(_acceptance, engine, caller)
            head = {"object": "acceptance", "replica": replica}
            reports = [] if found is None else [{**head, **found}]
            return json_response({"object": "list", "data": reports})
        timelines = [timeline for timeline in engine.timelines(id) if caller.may_see(timeline.owner)]
        return timelines_response(id, [timeline_json(timeline, replica) for timeline in timelines])

    return router


def _acceptance(engine: AsyncEngine, caller: Caller) -> JsonObject | None:
    """Return acceptance by slice of the requests that the caller may see, with likely causes of a low one.

    None without verified drafts.
    """
    # The reference is the card's best length, as in `manta drafter explain`;
    # this engine may draft fewer tokens than the card's did.
    spec, num_drafts = engine.config.speculative_config, engine.info.num_speculative_tokens
    lengths = [] if spec is None or spec.model is None else card_lengths(Path(spec.model))
    card = survival_of_length(min(max(lengths), num_drafts + 1), num_drafts) if lengths else None
    report = report_acceptance(engine.block_groups(caller.may_see), card)
    if report is None:
        return None
    return {"causes": [each.as_json() for each in likely_causes(report, PairEvidence())], **report.as_json()}


def timelines_response(id: str, timelines: Sequence[JsonObject]) -> Response:
    """Return an id's timelines, oldest first. Raises NotFoundError."""
    if not timelines:
        raise NotFoundError(
            f"There is no record of a request {brief(id)}. The last few thousand are kept, by the response's "
            "id or the X-Request-Id; the log has a line for each request that an engine served.",
            param="id",
        )
    return json_response(
        {"object": "list", "data": sorted(timelines, key=lambda timeline: timeline["arrived"])}
    )


def timeline_json(timeline: RequestTimeline, replica: str) -> JsonObject:
    """`arrived` is Unix time; other times are in milliseconds since arrival."""
    return {
        "object": "life",
        "id": timeline.request_id,
        "request_id": timeline.client_id,
        "replica": replica,
        "arrived": round(time.time() - (time.monotonic() - timeline.arrival_s), 3),
        "prompt_tokens": timeline.num_prompt_tokens,
        "begun_tokens": timeline.num_resumed,
        "max_tokens": timeline.max_tokens,
        "priority": timeline.priority,
        "background": timeline.background,
        "max_draft_tokens": timeline.max_draft_tokens,
        "stays": [_interval_json(interval, timeline.arrival_s) for interval in timeline.intervals],
        "ended_ms": _ms_after(timeline.arrival_s, timeline.ended_s),
        "finish_reason": timeline.finish_reason,
    }


def _interval_json(interval: SlotInterval, arrival_s: float) -> JsonObject:
    return {
        "entered_ms": _ms_after(arrival_s, interval.admitted_s),
        "waited_ms": {reason: _ms(seconds) for reason, seconds in interval.waited.items()},
        "cached_tokens": interval.num_cached,
        "cached_tokens_from_tier": interval.num_read,
        "forgotten_steps": interval.num_forgotten,
        "steps": [_step(step, arrival_s) for step in interval.steps],
        "left_ms": _ms_after(arrival_s, interval.released_s),
        "why": interval.why,
    }


def _step(step: TimelineStep, arrival_s: float) -> JsonObject:
    found = asdict(step)
    for moment in ("planned", "ended"):
        found[f"{moment}_ms"] = _ms_after(arrival_s, found.pop(f"{moment}_s"))
    for part in ("draft", "verify", "sample", "inject"):
        found[f"{part}_ms"] = _ms(found.pop(f"{part}_s"))
    return {name.removeprefix("num_"): value for name, value in found.items()}


def _ms_after(arrival_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else _ms(at_s - arrival_s)


def _ms(seconds: float) -> float:
    return round(1000.0 * seconds, 3)
