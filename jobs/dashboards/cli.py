"""The commands `manta dashboards ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..common.command_groups import CommandGroup

if TYPE_CHECKING:
    from .grafana_push import Difference, Grafana

Names = Literal["vllm", "ray", "both"]
# Flags that the commands share.
NamesOption = Annotated[
    Names,
    typer.Option("--names", help="Metric names: vllm for replicas' /metrics, ray for Ray's exporter."),
]
GrafanaUrl = Annotated[str, typer.Option("--grafana", metavar="URL", help="URL, as http://localhost:3000.")]
Token = Annotated[
    str,
    typer.Option("--token", envvar="GRAFANA_TOKEN", help="Token of a service account, or user:password."),
]
DataSource = Annotated[
    str | None,
    typer.Option("--datasource", show_default=False, help="Initially selected data source."),
]

dashboards = CommandGroup(help="Grafana dashboards and Prometheus alerts.")


@dashboards.command()
def render(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the JSON files.")],
    names: NamesOption = "both",
) -> None:
    """Write the dashboards to files, for Grafana's import or provisioning."""
    output.mkdir(parents=True, exist_ok=True)
    for board in _boards(names):
        path = output / f"{board['uid']}.json"
        path.write_text(json.dumps(board, indent=2) + "\n", encoding="utf-8")
        typer.echo(str(path))


@dashboards.command()
def push(
    grafana: GrafanaUrl,
    token: Token,
    folder: Annotated[str, typer.Option("--folder", help="Grafana folder; created if missing.")] = "Manta",
    datasource: DataSource = None,
    names: NamesOption = "both",
) -> None:
    """Push the dashboards to Grafana; unchanged ones are not written."""
    server, differences = _differences(grafana, token, datasource, names)
    folder_uid = server.folder(folder)
    for difference in differences:
        if difference.state != "unchanged":
            server.push(difference.wanted, folder_uid)
        typer.echo(f"{difference.state}: {difference.wanted['title']}")


@dashboards.command()
def diff(
    grafana: GrafanaUrl, token: Token, datasource: DataSource = None, names: NamesOption = "both"
) -> None:
    """Show what a push would change; exit code 1 if there are changes."""
    _, differences = _differences(grafana, token, datasource, names)
    for difference in differences:
        for line in difference.lines():
            typer.echo(line)
    if any(difference.state != "unchanged" for difference in differences):
        raise typer.Exit(1)


@dashboards.command()
def alerts(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default=False, help="Output file; default: standard output."),
    ] = None,
    baseline: Annotated[
        float | None,
        typer.Option(
            "--baseline",
            min=1.0,
            show_default=False,
            help="Usual mean acceptance length; default: that of a day before.",
        ),
    ] = None,
) -> None:
    """Write Prometheus's alerting rules (rule_files)."""
    import yaml

    from .dashboards import rules

    text = yaml.safe_dump(rules(baseline), sort_keys=False, width=1000)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


def _boards(names: Names) -> list[dict[str, Any]]:  # Any: JSON
    from .dashboards import boards, ray_names, vllm_names

    dialects = {"vllm": [vllm_names()], "ray": [ray_names()], "both": [vllm_names(), ray_names()]}[names]
    return [board for dialect in dialects for board in boards(dialect)]


def _differences(
    url: str, token: str, datasource: str | None, names: Names
) -> tuple[Grafana, list[Difference]]:
    from .grafana_push import Grafana

    server = Grafana(url, token)
    source = None if datasource is None else server.source(datasource)
    return server, [server.difference(board, source) for board in _boards(names)]
