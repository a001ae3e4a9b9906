"""`manta logs explain`: a request step by step, from a server's memory.

Without an id: acceptance of a server's last requests by slice, and likely causes of low acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from ..cluster.errors import NotFoundError
from .common.command_groups import CommandGroup
from .common.http_client import ServerClient, operators_key

logs = CommandGroup(help="Show what happened to a request.")
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


@logs.callback()
def _logs() -> None: ...


@logs.command()
def explain(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="Id of a response, or its X-Request-Id. Without: acceptance by slice."
        ),
    ] = None,
    url: Annotated[str, typer.Option("--url", help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Admin key; default: MANTA_ADMIN_API_KEY or MANTA_API_KEY."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a request step by step: waiting, prefill, each block of drafts, and its end.

    A server remembers its last requests. Without an id: acceptance by slice of each replica's last requests.
    """
    if request is None:
        for report in _acceptance(url, api_key):
            for text in [json.dumps(report)] if as_json else acceptance_lines(report):
                typer.echo(text)
        return
    for timeline in _timelines(url, request, api_key):
        for text in [json.dumps(timeline)] if as_json else timeline_lines(timeline):
            typer.echo(text)


def _timelines(url: str, request: str, api_key: str | None) -> list[Json]:
    with ServerClient(url, api_key=api_key or operators_key()) as client:
        return list(client.get_json(f"/explain?{urlencode({'id': request})}")["data"])


def _acceptance(url: str, api_key: str | None) -> list[Json]:
    with ServerClient(url, api_key=api_key or operators_key()) as client:
        found = list(client.get_json("/explain")["data"])
    if not found:
        raise NotFoundError("The server has verified no drafts yet.", param="id")
    return found


def acceptance_lines(report: Json) -> Iterator[str]:
    from .drafters.explain.explanation import cause_lines, summary_line, table_lines

    yield f"replica {report['replica']}: {summary_line(report)}"
    yield from cause_lines(report["causes"])
    yield from table_lines(report)


def timeline_lines(timeline: Json) -> Iterator[str]:
    moment = datetime.fromtimestamp(timeline["arrived"], UTC).replace(tzinfo=None)
    arrived = f"{moment.isoformat(sep=' ', timespec='milliseconds')} UTC"
    known_as = f" (request {timeline['request_id']})" if timeline["request_id"] else ""
    yield f"{timeline['id']}{known_as} on replica {timeline['replica']}"
    yield _at(0.0, f"arrived {arrived}: {_request_line(timeline)}")
    since_ms = 0.0
    for interval in timeline["stays"]:
        yield _at(
            interval["entered_ms"],
            f"runs, {_waited(interval, interval['entered_ms'] - since_ms)}{_cached(interval)}",
        )
        yield from _steps(interval)
        if interval["why"] in _LEFT:
            yield _at(interval["left_ms"], _LEFT[interval["why"]])
        since_ms = interval["left_ms"] or 0.0
    yield _end(timeline)


def _at(ms: float, text: str) -> str:
    return f"{ms:10.1f} ms  {text}"


def _request_line(timeline: Json) -> str:
    texts = [f"{timeline['prompt_tokens']} prompt tokens"]
    if timeline["begun_tokens"]:
        texts.append(f"{timeline['begun_tokens']} generated elsewhere")
    limit = timeline["max_tokens"]
    texts.append("no limit of output tokens" if limit is None else f"at most {limit} output tokens")
    if timeline["max_draft_tokens"] is not None:
        texts.append(f"at most {timeline['max_draft_tokens']} drafts a step")
    if timeline["priority"]:
        texts.append(f"priority {timeline['priority']}")
    return ", ".join(texts) + (", in the background" if timeline["background"] else "")


def _waited(interval: Json, ms: float) -> str:
    """Return the reasons for waiting, longest first; the remaining time is for a step in progress to end."""
    held = sorted(interval["waited_ms"].items(), key=lambda each: -each[1])
    parts = [f"{waited_ms:.1f} ms {_WAITED[reason]}" for reason, waited_ms in held if waited_ms >= _SHORT_MS]
    if (rest_ms := ms - sum(waited_ms for _, waited_ms in held)) >= _SHORT_MS:
        parts.append(f"{rest_ms:.1f} ms for a step to end")
    return "after " + ", ".join(parts) if parts else "at once"


def _cached(interval: Json) -> str:
    return (
        f"; {interval['cached_tokens']} tokens were in the prefix cache" if interval["cached_tokens"] else ""
    )


def _steps(interval: Json) -> Iterator[str]:
    if interval["forgotten_steps"]:
        yield f"{'':13}  ({interval['forgotten_steps']} engine steps are no longer recorded)"
    for step in interval["steps"]:
        took_ms = step["ended_ms"] - step["planned_ms"]
        spent = [(part, step[f"{part}_ms"]) for part in _PARTS]
        parts = ", ".join(f"{part} {ms:.1f}" for part, ms in spent if ms >= _SHORT_MS)
        others = f"{step['requests']} requests, {step['rows']} rows" if step["requests"] > 1 else "alone"
        did = f"{step['kind']:<8}{_step_line(step):<52}"
        yield _at(step["planned_ms"], f"{did}{took_ms:7.1f} ms ({parts}); {others}")


def _step_line(step: Json) -> str:
    if step["kind"] == "verify":
        cut = f", {step['verified']} verified" if step["verified"] != step["drafted"] else ""
        bonus = " and the bonus" if step["tokens"] > step["accepted"] else ""
        return f"{step['drafted']} drafted{cut}, {step['accepted']} accepted{bonus}"
    result = "the next token" if step["tokens"] else "no token yet"
    return f"{step['known']} known tokens, {result}" if step["kind"] == "prefill" else result


def _end(timeline: Json) -> str:
    steps = [step for interval in timeline["stays"] for step in interval["steps"]]
    tokens, verify = sum(s["tokens"] for s in steps), [s for s in steps if s["kind"] == "verify"]
    texts = f"{tokens} tokens in {len(steps)} steps"
    if verify:
        drafts, accepted = sum(s["verified"] for s in verify), sum(s["accepted"] for s in verify)
        length = 1 + accepted / len(verify)
        texts += f"; {accepted} of {drafts} verified drafts accepted, {length:.2f} tokens a block"
    if timeline["ended_ms"] is None:
        return f"{'':13}  not ended: {texts}"
    return _at(timeline["ended_ms"], f"ended ({timeline['finish_reason']}): {texts}")
