"""The command line `manta`: parses, hands over to one function per command, and turns errors into words.

Not the work itself: each command checks its settings, then imports its module, so that neither `--help` nor
a wrong flag waits for torch or Ray. A `MantaError` ends with exit code 1, wrong usage with 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..cluster.errors import MantaError
from .flags import engine_options, sampling_options
from .settings import engine_config, sampling_params

app = typer.Typer(
    name="manta",
    help="Ray-native inference with DFlash block-diffusion speculative decoding.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables cut long option names
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", show_default=False, help="Target checkpoint (or --model).")
]
# Any below: merged settings and sampling fields are plain data, checked where they become dataclasses.


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    try:
        app(arguments, prog_name="manta")
    except MantaError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(error.message)}")
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def manta(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
@engine_options
@sampling_options
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    settings: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue one prompt in this process, streaming to the terminal; figures go to standard error."""
    config, params = engine_config(settings), sampling_params(sampling)
    from .generate import generate_text

    generate_text(config, sys.stdin.read() if prompt == "-" else prompt, params)


@app.command()
@engine_options
@sampling_options
def chat(
    settings: dict[str, Any],
    sampling: dict[str, Any],
    model_: Model = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
) -> None:
    """Talk to a model in the terminal (/reset forgets the conversation, /exit or Ctrl-D ends)."""
    config, params = engine_config(settings), sampling_params(sampling)
    from .chat import run_chat

    run_chat(config, params, system)


if __name__ == "__main__":
    main()
