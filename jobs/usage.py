"""`manta receipts`: prints the usage of each tenant and what speculation saved."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from ..cluster.errors import ConfigError
from .common.http_client import ServerClient, operators_key
from .common.tables import print_table

Receipt = Mapping[str, Any]  # Any: JSON of `cluster/engine/usage_report.py`
_NOT_MEASURED = "not measured"
_COLUMNS = [
    *("day", "tenant", "category", "requests", "tokens", "steps", "saved"),
    *("device-s", "saved", "of", "plain measured"),
]


def receipts(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of --receipts; default: query the server.")
    ] = None,
    url: Annotated[str, typer.Option("--url", help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Admin key; default: MANTA_ADMIN_API_KEY or MANTA_API_KEY."),
    ] = None,
    day: Annotated[str | None, typer.Option("--day", help="Day in UTC, YYYY-MM-DD; default: all.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Tenant; default: all.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV instead of a table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
) -> None:
    """Show the usage of each tenant and category by day, and the measured savings by speculation."""
    found = _of_server(url, api_key, day, tenant) if folder is None else _of_folder(folder, day, tenant)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif as_csv:
        _write_csv(found)
    else:
        _print(found)


def _of_server(url: str, api_key: str | None, day: str | None, tenant: str | None) -> Sequence[Receipt]:
    parameters = {name: value for name, value in (("day", day), ("tenant", tenant)) if value is not None}
    with ServerClient(url, api_key=api_key or operators_key()) as client:
        return client.get_json(f"/receipts?{urlencode(parameters)}")["data"]


def _of_folder(folder: Path, day: str | None, tenant: str | None) -> Sequence[Receipt]:
    from ..actors.observability.usage_store import read_receipts

    try:
        return read_receipts(folder, day, tenant)
    except OSError as error:
        raise ConfigError(
            f"folder={str(folder)!r} cannot be read ({error.strerror}). Give the folder of --receipts.",
            param="folder",
        ) from None


def _write_csv(found: Sequence[Receipt]) -> None:
    if found:
        writer = csv.DictWriter(sys.stdout, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


def _print(found: Sequence[Receipt]) -> None:
    """Print a table; saved seconds are of steps compared with plain ones, "of" is their share."""
    rows = [
        [
            *(str(one[name]) for name in ("day", "tenant", "category")),
            *(f"{one[name]:,}" for name in ("requests", "tokens", "steps", "steps_saved")),
            f"{one['device_seconds']:,.1f}",
            *_compared(one),
        ]
        for one in found
    ]
    print_table("Receipts (device-seconds: engines' seconds times their GPUs)", _COLUMNS, rows, num_left=3)


def _compared(one: Receipt) -> list[str]:
    saved, all_s = one["device_seconds_saved"], one["device_seconds"]
    if saved is None:
        return [_NOT_MEASURED, "-", "-"]
    age_s = one["plain_age_seconds"]
    when = "at an earlier start" if age_s is None else f"{age_s:,.0f} s before"
    return [f"{saved:,.1f}", f"{100 * one['compared_device_seconds'] / max(all_s, 1e-9):.0f} %", when]
