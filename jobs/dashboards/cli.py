"""`manta dashboards ...`, as `jobs/cli.py` has the other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from .push import Difference, Grafana

Names = Literal["vllm", "ray", "both"]
# Flags that the commands share.
NamesOption = Annotated[
    Names,
    typer.Option("--names", help="vllm: of replicas' /metrics; ray: of Ray's exporter."),
]
GrafanaUrl = Annotated[str, typer.Option("--grafana", metavar="URL", help="As http://localhost:3000.")]
Token = Annotated[
    str,
    typer.Option("--token", envvar="GRAFANA_TOKEN", help="Of a service account, or user:password."),
]
DataSource = Annotated[
    str | None,
    typer.Option("--datasource", show_default=False, help="Name of a Prometheus data source to begin with."),
]

dashboards = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Grafana's dashboards and Prometheus's alerts."
)


@dashboards.command()
def render(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for one JSON file each.")],
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
    folder: Annotated[str, typer.Option("--folder", help="Made if there is none.")] = "Manta",
    datasource: DataSource = None,
    names: NamesOption = "both",
) -> None:
    """Put the dashboards into a Grafana; what is there alike stays untouched."""
    server, differences = _differences(grafana, token, datasource, names)
    folder_uid = server.folder(folder)
    for difference in differences:
        if difference.state != "as it was":
            server.push(difference.wanted, folder_uid)
        typer.echo(f"{difference.state}: {difference.wanted['title']}")


@dashboards.command()
def diff(
    grafana: GrafanaUrl, token: Token, datasource: DataSource = None, names: NamesOption = "both"
) -> None:
    """Show what a push would change; ends with 1 if it would change anything."""
    _, differences = _differences(grafana, token, datasource, names)
    for difference in differences:
        for line in difference.lines():
            typer.echo(line)
    if any(difference.state != "as it was" for difference in differences):
        raise typer.Exit(1)


@dashboards.command()
def alerts(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default=False, help="File; else standard output."),
    ] = None,
    baseline: Annotated[
        float | None,
        typer.Option(
            "--baseline",
            min=1.0,
            show_default=False,
            help="Usual mean acceptance length; that of a day before if absent.",
        ),
    ] = None,
) -> None:
    """Write Prometheus's alerting rules (rule_files)."""
    import yaml

    from .alerts import rules

    text = yaml.safe_dump(rules(baseline), sort_keys=False, width=1000)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


def _boards(names: Names) -> list[dict[str, Any]]:  # Any: JSON
    from .boards import boards
    from .queries import ray_names, vllm_names

    dialects = {"vllm": [vllm_names()], "ray": [ray_names()], "both": [vllm_names(), ray_names()]}[names]
    return [board for dialect in dialects for board in boards(dialect)]


def _differences(
    url: str, token: str, datasource: str | None, names: Names
) -> tuple[Grafana, list[Difference]]:
    from .push import Grafana

    server = Grafana(url, token)
    source = None if datasource is None else server.source(datasource)
    return server, [server.difference(board, source) for board in _boards(names)]
