"""Formats a request's timeline from /explain as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

Json = Mapping[str, Any]  # Any: JSON

_WAITED = {
    "slots": "for a slot",
    "pages": "for pages",
    "rows": "for rows of a step",
    "whole_prompt": "for a step that holds the whole prompt",
}
_LEFT = {
    "preempted": "preempted: its pages were given to others; its tokens are recomputed on readmission",
    "refilled": "removed, to be recomputed for the drafter",
}
_PARTS = ("draft", "verify", "sample", "inject")
_SHORT_MS = 0.05  # shorter times are not shown


def timeline_lines(life: Json) -> Iterator[str]:
    moment = datetime.fromtimestamp(life["arrived"], UTC).replace(tzinfo=None)
    arrived = f"{moment.isoformat(sep=' ', timespec='milliseconds')} UTC"
    known_as = f" (request {life['request_id']})" if life["request_id"] else ""
    yield f"{life['id']}{known_as} on replica {life['replica']}"
    yield _at(0.0, f"arrived {arrived}: {_asked(life)}")
    since_ms = 0.0
    for stay in life["stays"]:
        yield _at(stay["entered_ms"], f"runs, {_waited(stay, stay['entered_ms'] - since_ms)}{_cached(stay)}")
        yield from _steps(stay)
        if stay["why"] in _LEFT:
            yield _at(stay["left_ms"], _LEFT[stay["why"]])
        since_ms = stay["left_ms"] or 0.0
    yield _end(life)


def _at(ms: float, text: str) -> str:
    return f"{ms:10.1f} ms  {text}"


def _asked(life: Json) -> str:
    said = [f"{life['prompt_tokens']} prompt tokens"]
    if life["begun_tokens"]:
        said.append(f"{life['begun_tokens']} generated elsewhere")
    limit = life["max_tokens"]
    said.append("no limit of output tokens" if limit is None else f"at most {limit} output tokens")
    if life["max_draft_tokens"] is not None:
        said.append(f"at most {life['max_draft_tokens']} drafts a step")
    if life["priority"]:
        said.append(f"priority {life['priority']}")
    return ", ".join(said) + (", in the background" if life["background"] else "")


def _waited(stay: Json, ms: float) -> str:
    """Return the reasons for waiting, longest first; the remaining time is for a step in progress to end."""
    held = sorted(stay["waited_ms"].items(), key=lambda each: -each[1])
    parts = [f"{waited_ms:.1f} ms {_WAITED[reason]}" for reason, waited_ms in held if waited_ms >= _SHORT_MS]
    if (rest_ms := ms - sum(waited_ms for _, waited_ms in held)) >= _SHORT_MS:
        parts.append(f"{rest_ms:.1f} ms for a step to end")
    return "after " + ", ".join(parts) if parts else "at once"


def _cached(stay: Json) -> str:
    return f"; {stay['cached_tokens']} tokens were in the prefix cache" if stay["cached_tokens"] else ""


def _steps(stay: Json) -> Iterator[str]:
    if stay["forgotten_steps"]:
        yield f"{'':13}  ({stay['forgotten_steps']} engine steps are no longer recorded)"
    for step in stay["steps"]:
        took_ms = step["ended_ms"] - step["planned_ms"]
        spent = [(part, step[f"{part}_ms"]) for part in _PARTS]
        parts = ", ".join(f"{part} {ms:.1f}" for part, ms in spent if ms >= _SHORT_MS)
        others = f"{step['requests']} requests, {step['rows']} rows" if step["requests"] > 1 else "alone"
        did = f"{step['kind']:<8}{_did(step):<52}"
        yield _at(step["planned_ms"], f"{did}{took_ms:7.1f} ms ({parts}); {others}")


def _did(step: Json) -> str:
    if step["kind"] == "verify":
        cut = f", {step['verified']} verified" if step["verified"] != step["drafted"] else ""
        bonus = " and the bonus" if step["tokens"] > step["accepted"] else ""
        return f"{step['drafted']} drafted{cut}, {step['accepted']} accepted{bonus}"
    brought = "the next token" if step["tokens"] else "no token yet"
    return f"{step['known']} known tokens, {brought}" if step["kind"] == "prefill" else brought


def _end(life: Json) -> str:
    steps = [step for stay in life["stays"] for step in stay["steps"]]
    tokens, verify = sum(s["tokens"] for s in steps), [s for s in steps if s["kind"] == "verify"]
    said = f"{tokens} tokens in {len(steps)} steps"
    if verify:
        drafts, accepted = sum(s["verified"] for s in verify), sum(s["accepted"] for s in verify)
        length = 1 + accepted / len(verify)
        said += f"; {accepted} of {drafts} verified drafts accepted, {length:.2f} tokens a block"
    if life["ended_ms"] is None:
        return f"{'':13}  not ended: {said}"
    return _at(life["ended_ms"], f"ended ({life['finish_reason']}): {said}")
