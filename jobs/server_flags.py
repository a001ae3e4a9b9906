"""The flags of `manta serve` that are settings of the endpoint, as typer options; the engine's: `flags.py`.

A command declared with `@server_options` receives those that were given as `server`: names of
`ServerSettings`, to be put over what a YAML file says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..actors.http.settings import Isolation, UnknownParams
from ..actors.process_log import LogFormat
from .flags import Command, parse_object, parse_size, with_options

SERVER = "Server"


def _server(kind: Any, *names: str, help: str, **more: Any) -> Any:  # Any: a typing form
    return Annotated[kind | None, typer.Option(*names, help=help, rich_help_panel=SERVER, **more)]


SERVER_OPTIONS = {
    "served_model_name": _server(list[str], "--served-model-name", help="Name in the API; may be repeated."),
    "api_key": _server(
        list[str],
        "--api-key",
        help="Key that requests must bring; may be repeated. Others on this machine can see it: better "
        "--api-key-file, or MANTA_API_KEY.",
    ),
    "api_key_file": _server(
        Path, "--api-key-file", help="File with such keys, one a line; behind a key its tenant, or *."
    ),
    "admin_api_key": _server(
        list[str],
        "--admin-api-key",
        help="Key for the operators' routes (/load), good for all others and for what other keys own; may be "
        "repeated. Also in MANTA_ADMIN_API_KEY.",
    ),
    "admin_api_key_file": _server(Path, "--admin-api-key-file", help="File with such keys, one a line."),
    "metrics_api_key": _server(
        list[str],
        "--metrics-api-key",
        help="Key for /metrics alone; may be repeated. By default the admin key opens it, or else any key. "
        "Also in MANTA_METRICS_API_KEY.",
    ),
    "metrics_api_key_file": _server(Path, "--metrics-api-key-file", help="File with such keys, one a line."),
    "prefix_cache_isolation": _server(
        Isolation,
        "--prefix-cache-isolation",
        help="Whose prompts share cached beginnings: those of all (none), of a key (the default with several "
        "keys) or of a tenant. A system prompt is then computed for each.",
    ),
    "tenants": _server(
        list[str],
        "--tenants",
        help="Name that X-Tenant may say, told apart in metrics and receipts; may be repeated, * for any.",
    ),
    "categories": _server(list[str], "--categories", help="The same for X-Category."),
    "allowed_origins": _server(
        list[str], "--allowed-origins", help="Origin whose web pages may ask (CORS); may be repeated."
    ),
    "generation_config": _server(
        str,
        "--generation-config",
        help="Defaults of sampling: the checkpoint's generation_config.json (auto), OpenAI's (openai; vLLM's "
        "name is vllm), or those of a folder.",
    ),
    "override_generation_config": _server(
        dict,
        "--override-generation-config",
        parser=parse_object,
        metavar="JSON",
        help='Defaults over those: \'{"temperature": 0.6, "max_new_tokens": 512}\'.',
    ),
    "unknown_params": _server(
        UnknownParams,
        "--unknown-params",
        help="Fields of a request that nobody knows: ignore, warn (header X-Ignored-Params; the default) or "
        "reject.",
    ),
    "sse_keep_alive_interval": _server(
        float,
        "--sse-keep-alive-interval",
        help="Seconds between comments in a silent stream; 0: none.",
    ),
    "max_request_bytes": _server(
        int, "--max-request-bytes", help="Largest body of a request.", parser=parse_size, metavar="SIZE"
    ),
    "max_unread_bytes": _server(
        int,
        "--max-unread-bytes",
        help="Memory of what a client has not read of its streams; beyond it they end (408). 4 MiB.",
        parser=parse_size,
        metavar="SIZE",
    ),
    "reader_timeout": _server(
        float,
        "--reader-timeout",
        help="Seconds after which a client that takes nothing of its answer is cut off; 300, 0: never.",
    ),
    "max_requests_per_key": _server(
        int,
        "--max-requests-per-key",
        help="Completions of one API key, running and waiting, at each replica; more get 429. Else no limit.",
    ),
    "tool_call_parser": _server(
        str,
        "--tool-call-parser",
        help="How the model calls tools: hermes, qwen3_coder, llama3_json, openai ...; auto (by its chat "
        "template), none.",
    ),
    "reasoning_parser": _server(
        str, "--reasoning-parser", help="How it writes what it thinks: qwen3, ...; auto, none."
    ),
    "enable_auto_tool_choice": _server(
        bool,
        "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
        help='Whether requests may leave the choice of tools to the model ("auto"); by default they may.',
    ),
    "reasoning_field_name": _server(
        str,
        "--reasoning-field-name",
        help="reasoning or reasoning_content; by default answers have their reasoning in both.",
    ),
    "batch_storage": _server(
        str,
        "--batch-storage",
        help="Folder or URL (s3://...) where /v1/files and /v1/batches keep all they know.",
    ),
    "max_stored_bytes": _server(
        int,
        "--max-stored-bytes",
        help="Files and batches' outputs that one key may keep (10 GB).",
        parser=parse_size,
        metavar="SIZE",
    ),
    "receipts": _server(
        Path,
        "--receipts",
        help="Folder for what was spent for each tenant and category, by day, and saved (manta receipts).",
    ),
    "replicas": _server(
        str,
        "--replicas",
        "--data-parallel-size",
        "-dp",
        metavar="N|LEAST:MOST",
        help="Engines; 1:4 follows the load, 0:4 goes away when idle, 1:1 keeps streams when it dies.",
    ),
    "ui": _server(bool, "--ui/--no-ui", help="The live page at /ui; there by default."),
    "log_format": _server(
        LogFormat, "--log-format", help="Of the log lines of all processes: text, or json, an object a line."
    ),
    "otlp_traces_endpoint": _server(
        str,
        "--otlp-traces-endpoint",
        metavar="URL",
        help="Collector that gets a span of each request (OTLP over HTTP); needs manta[otel].",
    ),
    "lossless_audit": _server(
        float,
        "--lossless-audit",
        metavar="SHARE",
        help="Answers to compute again without speculation, and compare, while nobody asks: 0 (none) to 1.",
    ),
    "capture": _server(
        Path,
        "--capture",
        metavar="FOLDER",
        help="Keep prompts and answers there, as token ids, to adapt drafters to them.",
    ),
    "capture_fraction": _server(
        float, "--capture-fraction", metavar="SHARE", help="Requests to keep: 0 to 1 (all)."
    ),
    "capture_max_bytes": _server(
        int,
        "--capture-max-bytes",
        help="Most that the folder holds; the oldest goes first.",
        parser=parse_size,
        metavar="SIZE",
    ),
    "capture_redact": _server(
        str,
        "--capture-redact",
        metavar="MODULE:FUNCTION",
        help="Called with each completion before it is kept; returns it, changed perhaps, or None.",
    ),
    "capture_prompts": _server(
        bool, "--capture-prompts/--no-capture-prompts", help="Keep prompts, too; by default they are kept."
    ),
    "shutdown_timeout": _server(
        float,
        "--shutdown-timeout",
        help="Seconds that requests may go on after Ctrl-C or SIGTERM (else the file's, or 30).",
    ),
}


def _listed(values: Sequence[str]) -> list[str]:
    """Return values of which some are lists in JSON, as vLLM's --allowed-origins takes them."""
    try:
        return [item for value in values for item in (json.loads(value) if value[:1] == "[" else [value])]
    except ValueError:
        raise typer.BadParameter(f"--allowed-origins: {values!r} holds a list that is no JSON.") from None


def server_options(command: Command) -> Command:
    """Give `command` the endpoint's flags; it receives those that were given as `server`."""

    def gather(flags: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        for name in ("batch_storage", "capture", "receipts"):
            if name in given and "://" not in str(given[name]):
                given[name] = str(Path(given[name]).absolute())
        if "allowed_origins" in given:
            given["allowed_origins"] = _listed(given["allowed_origins"])
        return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}

    return with_options(command, SERVER_OPTIONS, "server", gather)
