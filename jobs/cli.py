"""The command line `manta`: parses arguments, calls one function per command, and prints errors.

Each command checks its settings and only then imports its module, so that neither `--help` nor a wrong flag
waits for torch or Ray. `jobs/common/engine_flags.py` explains how flags become settings. A `MantaError` exits
with code 1, wrong usage with 2.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from ..actors.system.wait_messages import counting, say
from ..cluster.config import EngineConfig
from ..cluster.errors import ConfigError, MantaError, RequestError
from .batch.options import BatchOptions
from .bench.cli import bench
from .common.command_groups import OPERATION, CommandGroup
from .common.config_file import check_new_file, read_config_file
from .common.config_loading import DEFAULT_CONFIG, engine_config, merge_settings, sampling_params, used_config
from .common.engine_flags import (
    EngineFlags,
    Model,
    SamplingFlags,
    ServerFlags,
    Settings,
    given_flags,
    options_of,
    with_flags,
)
from .common.options import (
    AuditOptions,
    CompileOptions,
    DoctorOptions,
    NodeOptions,
    PlanOptions,
    ServeOptions,
)
from .common.stop_signals import Stopped, StopSignals
from .common.vllm_flags import without_vllm_flags
from .dashboards.cli import dashboards
from .demo.demo_run import DemoOptions, run_demo
from .drafters.cli import drafter
from .kv_tier import kv_tier
from .logs import logs
from .models import models

app = CommandGroup(
    name="manta",
    help="Ray-native inference with DFlash block-diffusion speculative decoding.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # accept --max_num_seqs, like vLLM
    },
)
simulate = CommandGroup(help="Simulate a node of GPUs that serves a model.")
app.add_typer(bench, name="bench")
app.add_typer(dashboards, name="dashboards")
app.add_typer(drafter, name="drafter")
app.add_typer(kv_tier, name="kv-tier")
app.add_typer(logs, name="logs")
app.add_typer(models, name="models")
app.add_typer(simulate, name="simulate")
RenderKind = Literal["kuberay-service", "kuberay-job", "ray-up", "dockerfile", "systemd"]
SHUTDOWN_TIMEOUT_S = 30.0  # default for a server in a terminal
KV_TIER = "auto"  # likewise: what `serve deploy` may write on the nodes of a cluster, its config says
# Any: merged settings and sampling fields are plain data, validated when they become dataclasses.


def main(arguments: Sequence[str] | None = None) -> None:
    if arguments is None:
        _use_utf8()
    try:
        app(without_vllm_flags(sys.argv[1:] if arguments is None else arguments), prog_name="manta")
    except MantaError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(error.message)}")
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        typer.echo("error: too many open files; raise the limit (ulimit -n 8192).", err=True)
        sys.exit(1)
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)


def _use_utf8() -> None:
    """Use UTF-8 for text, file names and subprocesses, whatever the locale.

    If Python was started with another encoding (PYTHONUTF8=0, an old locale), restart it, since arguments are
    decoded before our first line. A stream with another encoding (PYTHONIOENCODING) escapes characters.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"prompt: standard input is not UTF-8 (byte {error.start}: {error.reason}).", param="prompt"
        ) from None


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
@with_flags
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    sampling: SamplingFlags,
    config: EngineConfig,
) -> None:
    """Continue one prompt in this process and stream the text; statistics go to standard error."""
    params = sampling_params(sampling)
    from .common.generate import generate_text

    text = _standard_input() if prompt == "-" else prompt
    generate_text(config, text, params, limit=sampling.get("max_tokens"))


@app.command()
@with_flags
def chat(
    sampling: SamplingFlags,
    config: EngineConfig,
    model_: Model = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
) -> None:
    """Chat with a model in the terminal (/reset clears the conversation, /exit or Ctrl-D quits)."""
    params = sampling_params(sampling)
    from .common.generate import run_chat

    run_chat(config, params, system, limit=sampling.get("max_tokens"))


@app.command()
@with_flags
def serve(
    where: Annotated[dict[str, Any], given_flags(options_of(ServeOptions, OPERATION, defaults=False))],
    server: ServerFlags,
    flags: EngineFlags,
    model_: Model = None,
) -> None:
    """Serve an OpenAI-compatible endpoint with Ray Serve until Ctrl-C; running requests may then finish."""
    file = used_config(flags.pop("config", None), flags.get("model"))
    defaults = {"shutdown_timeout": SHUTDOWN_TIMEOUT_S, "kv_tier_path": KV_TIER}
    settings = {**defaults, **merge_settings(flags, file), **server}
    options = ServeOptions(**{**serve_address(file), **where})
    try:
        with StopSignals() as signals:
            from .serve.server import start_server

            with start_server(settings, options, signals=signals) as running:
                running.serve_until_stopped()
    except Stopped as stopped:
        typer.echo(f"{stopped} before the server was ready", err=True)
        raise typer.Exit(stopped.exit_code) from None


def serve_address(file: Path | None) -> Mapping[str, Any]:
    """Return `host` and `port` of the file, if any, and print the names of its unused settings."""
    if file is None:
        return {}
    found = read_config_file(file)
    if found.unused:
        typer.echo(f"manta: {file}: only `serve deploy` uses {', '.join(found.unused)}", err=True)
    return found.address


@app.command()
@app.command("run-batch", help="Alias of batch.", hidden=True)
@with_flags
def batch(
    options: BatchOptions,
    sampling: SamplingFlags,
    settings: Settings,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue the job in the output folder.")
    ] = True,
    force_resume: Annotated[
        bool, typer.Option("--force-resume", help="Continue although settings or input changed.")
    ] = False,
    validate_only: Annotated[
        bool,
        typer.Option(
            "--validate-only", help="Check every row without answering; exit code 1 if rows are bad."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the job would do, and exit.")
    ] = False,
) -> None:
    """Answer every row of a dataset with engines on Ray. No row is lost: the same command resumes the job.

    A bad row becomes an error row; --seed fixes sampling. Columns named like sampling fields (max_tokens,
    temperature, ...) override flags. The `model` of an OpenAI batch line is ignored. Ctrl-C and SIGTERM end
    the job and keep all answers. On a cluster: `ray job submit ... -- manta batch ...`.
    """
    config = engine_config(settings)
    names = settings.get("served_model_name")
    if force_resume and not resume:
        raise ConfigError("force_resume and no_resume exclude each other; give one.", param="resume")
    options = replace(
        options,
        resume="force" if force_resume else "yes" if resume else "no",
        sampling=sampling,
        model_name=names[0] if isinstance(names, list) else names,
    )
    try:
        with StopSignals() as signals:
            from .batch.job import check_answered, run_batch

            if dry_run or validate_only:
                from .batch.preflight import run_preflight

                raise typer.Exit(run_preflight(config, options, dry_run=dry_run))
            report = run_batch(config, options, signals)
            report.print()
            check_answered(report.stats, options)
    except Stopped as stopped:
        if not stopped.is_reported:
            typer.echo(f"{stopped} before anything was answered", err=True)
        raise typer.Exit(stopped.exit_code) from None


@app.command()
def render(
    kind: Annotated[RenderKind, typer.Argument(help="Kind of file.", show_default=False)],
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
    cpus: Annotated[
        float | None,
        typer.Option(
            "--cpus",
            min=0.5,
            show_default=False,
            help="For kuberay-*: cores of a pod with engines; default: 8 for each GPU, or 8.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            show_default=False,
            help="For kuberay-*: RAM of a pod with engines; default: 64Gi for each GPU, or 32Gi.",
        ),
    ] = None,
    model_cache: Annotated[
        str | None,
        typer.Option(
            "--model-cache",
            metavar="CLAIM",
            show_default=False,
            help="For kuberay-*: PersistentVolumeClaim that keeps downloads from the hub for all pods.",
        ),
    ] = None,
    compile_for: Annotated[
        str | None,
        typer.Option(
            "--compile",
            metavar="GPU",
            show_default=False,
            help="For dockerfile: run manta compile for it.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default=False, help="Output file; default: standard output."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Make the files that deploy a ray_config.yaml to KubeRay, ray up, a container or systemd."""
    from .render.documents import PodOptions, render_document

    if output is not None:
        check_new_file(output, force=force)
    pod = PodOptions(cpus, memory, model_cache)
    text = render_document(kind, config, gpus_per_node, image, batch_flags or [], pod, compile_for)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


@app.command()
@with_flags
def demo(options: DemoOptions) -> None:
    """Serve a small published model and its drafter, run a dataset, and compare with plain decoding."""
    run_demo(options)


@app.command()
@with_flags
def doctor(
    options: DoctorOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a table of all findings, not a summary.")
    ] = False,
) -> None:
    """Report what this machine has and what Manta uses of it, and check that it computes correctly.

    Compares kernels with fp64 and speculation with plain decoding token by token, and measures bandwidth.
    Needs neither Ray nor HTTP. Exit code 1 if a check failed, with what to do.
    """
    with counting("loading PyTorch and the compiled loops", say):
        from .doctor.doctor_run import print_report, run_doctor

    report = run_doctor(options)
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_report(report, verbose=verbose)
    if report["failed"]:
        raise typer.Exit(1)


@app.command()
@with_flags
def audit(options: AuditOptions, config: EngineConfig, model_: Model = None) -> None:
    """Decode a dataset with and without speculation, compare token by token, and write a certificate.

    Both passes use one engine with different batches, which must not matter either. Exit code 1 if any token
    differs.
    """
    with counting("loading PyTorch", say, begin=False):
        from .audit.audit_run import print_certificate, run_audit

    certificate = run_audit(config, options)
    print_certificate(certificate)
    if certificate["mismatches"]:
        raise typer.Exit(1)


@app.command()
@with_flags
def plan(options: PlanOptions) -> None:
    """Plan a model's layout over a node's GPUs, with estimated speeds and the best one's ray_config.yaml.

    Uses shapes and rates only: needs no GPU, no weights and no Ray.
    """
    from .plan.make_plan import make_plan

    make_plan(options)


@app.command("compile")
@with_flags
def compile_(options: CompileOptions, config: EngineConfig, model_: Model = None) -> None:
    """Compile the GPU kernels of a start with these settings into Triton's cache, without GPU and weights."""
    with counting("loading PyTorch", say, begin=False):
        from .compile.compile_run import run_compile

    run_compile(config, options)


@simulate.callback()
def _simulate() -> None: ...


@simulate.command()
@with_flags
def node(options: NodeOptions) -> None:
    """Simulate load on one node for each method: throughput per GPU against speed per user.

    Runs the real scheduler and policies with the roofline's step times; see docs/simulation.md.
    """
    from .simulate.node_run import run_node

    run_node(options)


if __name__ == "__main__":
    main()
