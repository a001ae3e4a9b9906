"""The command `manta logs explain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer

from ..common.http_client import ServerClient, operators_key
from .log_files import lines_about
from .timeline_text import Json, timeline_lines

logs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Questions about logged requests.")


@logs.callback()
def _logs() -> None: ...


@logs.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="ID", help="Id of a response, or its X-Request-Id.")],
    url: Annotated[str, typer.Option("--url", help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Operators' key; default: MANTA_ADMIN_API_KEY or MANTA_API_KEY."),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Log file instead of a server; prints its lines; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a request step by step: waiting, prefill, each block of drafts, and its end.

    A server remembers its last requests. Its log (--log-format json) has a summary line for each request and
    all other lines about it.
    """
    if files:
        for line in lines_about(request, files):
            typer.echo(json.dumps(line.fields) if as_json else line.text)
        return
    for timeline in _timelines(url, request, api_key):
        for text in [json.dumps(timeline)] if as_json else timeline_lines(timeline):
            typer.echo(text)


def _timelines(url: str, request: str, api_key: str | None) -> list[Json]:
    with ServerClient(url, api_key=api_key or operators_key()) as client:
        return list(client.found(f"/explain?{urlencode({'id': request})}")["data"])
