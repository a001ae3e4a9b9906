"""The command `manta render`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..common.config_loading import DEFAULT_CONFIG
from ..common.yaml_file import check_new_file

Kind = Literal["kuberay-service", "kuberay-job", "ray-up", "dockerfile", "systemd"]


def render(
    kind: Annotated[Kind, typer.Argument(help="Kind of file.", show_default=False)],
    batch_flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- BATCH FLAGS]",
            show_default=False,
            help="For kuberay-job: flags of manta batch, as -- --input s3://bucket/in --output s3://bucket/out",
        ),
    ] = None,
    config: Annotated[Path, typer.Option("--config", help="A Serve config.")] = DEFAULT_CONFIG,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", min=1, show_default=False, help="Default: what the engines need, at most 8."
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", show_default=False, help="Container image; default: manta:VERSION."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default=False, help="Output file; default: standard output."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Make the files that deploy a ray_config.yaml to KubeRay, ray up, a container or systemd."""
    from .documents import render_document

    if output is not None:
        check_new_file(output, force=force)
    text = render_document(kind, config, gpus_per_node, image, batch_flags or [])
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
