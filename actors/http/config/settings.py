"""Settings of the HTTP server. `settings_mapping.py` reads them, with the engine's, from one flat mapping."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from ....cluster.config import from_mapping, one_of
from ....cluster.errors import ConfigError, brief, brief_url
from ....cluster.flag import NO_FLAG, Flag, FolderPath, Size
from ....cluster.fleet.autoscaling import ScalingRules
from ....cluster.metrics.metric import ANY, is_label
from ...checkpoints.checkpoint_paths import served_name
from ...system.log_setup import LogFormat
from ...tokenization.generation_config import GenerationDefaults

UnknownParams = Literal["ignore", "warn", "reject"]
SpeculationMetrics = Literal["none", "summary", "detailed"]
ReasoningField = Literal["reasoning", "reasoning_content"]
Isolation = Literal["none", "key", "tenant"]
_NAMES = ("allowed_origins", "tenants", "categories")  # a single name is accepted for a list of one
_HOOK = re.compile(r"[\w.]+:\w+")
_KEY = re.compile(r"([\x21-\x7e]+)(?:[ \t]+(\S+))?")  # a key, optionally followed by its tenant
LEAST = {
    "max_request_bytes": 1024,
    "max_stored_bytes": 1024,
    "max_unread_bytes": 1024,
    "max_batch_file_bytes": 1024,
    "max_batch_lines": 1,
    "max_metric_labels": 0,
    "capture_max_bytes": 2**20,
}

# Paths that need no key, except that `/metrics` needs one if any is set, and that the page `/ui` asks for the
# key itself. They skip queues and are neither counted nor logged.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/", "/ui"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the OpenAI-compatible HTTP server.

    Attributes:
        served_model_name: name of the model in the API; may be repeated. The first is reported. By default
            the engine's `model`, of a GGUF file its name without the ending.
        generation_config: sampling defaults: the checkpoint's generation_config.json ("auto"), OpenAI's
            ("openai"; vLLM's name is vllm), or those of a folder.
        override_generation_config: other values for keys of that file: '{"temperature": 0.6}'. The keys are
            temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens.
        unknown_params: unknown fields of a request: ignore them, answer with the header X-Ignored-Params
            ("warn", the default), or reject the request. "warn" also writes a log line; "reject" answers 400.
        tool_call_parser: format of the model's tool calls: hermes, qwen3_coder, llama3_json, openai, ... (see
            actors/chat/chat_formats.py); auto (by its chat template), none.
        reasoning_parser: format of the model's reasoning: qwen3, ...; auto (by its chat template), none.
        enable_auto_tool_choice: requests may leave the choice of tools to the model ("auto"); by default they
            may.
        reasoning_field_name: field of an answer that holds its reasoning; by default both do: `reasoning`
            (vLLM's) and `reasoning_content` (that of most others).
        enable_per_request_metrics: responses report the request's times in `metrics`.
        per_request_spec_decode_metrics: responses report speculation there, too: "summary", or "detailed"
            with each step, or "none". Requests can ask for more with `speculative.return_trace`.
        sse_keep_alive_interval: seconds between comment lines in a silent stream; 0 sends none. When it is
            set, a stream may begin (status 200) before its first token.
        max_request_bytes: largest body of a request. Larger ones are refused with 413.
        max_unread_bytes: memory for the part of its streams that a client has not read (4 MiB by default);
            beyond it they end (408). It counts all streams of a request together; their slots are freed. A
            streamed token takes about 12 bytes, with 20 log probabilities 1,600.
        reader_timeout: seconds after which a client that reads nothing of its answer is disconnected; 300 by
            default, 0: never.
        max_requests_per_key: completions of one API key, running and waiting, at each replica; more get 429.
            No limit by default; a server without keys counts none.
        api_key: key that requests must send as a bearer token; may be repeated; other users of the machine
            can see flags: better use api_key_file or MANTA_API_KEY. The key may be followed by the tenant
            that its requests count for ("KEY TENANT"), or by `*` for a proxy's key with a trusted X-Tenant.
            Only from flags and code: no YAML file may hold keys (`actors/http/middleware/api_keys.py`).
        api_key_file: file with keys that requests must send, one a line, each followed by its tenant or *, if
            any. MANTA_API_KEY replaces both settings.
        admin_api_key: key for the operators' routes (/load), valid for all others and for what other keys
            own; may be repeated; also in MANTA_ADMIN_API_KEY. The routes are `api_keys.ADMIN_PATHS`; without
            such a key they need the same key as the others.
        admin_api_key_file: file with keys for the operators' routes, one a line.
        metrics_api_key: key for /metrics alone; may be repeated; also in MANTA_METRICS_API_KEY; by default
            the admin key opens it, or else any key. A scraper then needs no admin key. Without any key
            /metrics is open.
        metrics_api_key_file: file with keys for /metrics alone, one a line.
        prefix_cache_isolation: which prompts share cached beginnings: all ("none"), those of a "key" (the
            default with several keys), or those of a "tenant". Sharing is visible in times and
            `cached_tokens`. A key without a tenant counts as its own. A system prompt that keys have in
            common is then computed and cached once for each.
        allowed_origins: origin of web pages that may call (CORS); may be repeated.
        batch_storage: folder or URL (s3://, gs://, abfs://) where /v1/files and /v1/batches keep all their
            data. Every replica must reach it (in YAML: an absolute path), and no other endpoint may use it.
            Without it those routes answer 501.
        max_batch_file_bytes: larger uploads are refused with 413.
        max_stored_bytes: bytes of files and batches' outputs that one key may keep in `batch_storage` (10 GB
            by default). Beyond it uploads and new batches are refused with 413. A file counts 4 KiB at least.
        max_batch_lines: batches of files with more lines fail.
        replicas: number of engines; 1:4 follows the load, 0:4 scales to zero when idle, 1:1 keeps streams
            when the engine dies. All but a plain 1 (and several models) have a gateway in front, which
            chooses among the replicas and resumes streams after their replica dies.
        shutdown_timeout: seconds that requests may continue after Ctrl-C or SIGTERM; `manta serve` has 30.
            The same holds for each replica that is stopped, when fewer are wanted and in an update. Requests
            that still run then get an error event and `[DONE]`.
        scaling: how quickly the number of replicas follows the load: fields of `ScalingRules`
            (cluster/fleet/autoscaling.py).
        ui: serve the live page at /ui.
        log_format: format of the log lines of all processes: text, or json (an object in each line).
        otlp_traces_endpoint: URL of a collector that gets a span of each request (OTLP over HTTP); needs
            opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http. Without the setting it is
            OTEL_EXPORTER_OTLP_ENDPOINT of the replica's environment, or no tracing.
        lossless_audit: share of answers that an idle engine computes again without speculation, and compares:
            0 (none) to 1. They are compared token by token. 0 leaves an idle engine idle.
        capture: folder that keeps prompts and answers, as token ids, to adapt drafters to them. Created with
            mode 0700 (in YAML: an absolute path), for `manta drafter adapt`. Requests with `"store": false`
            or `Cache-Control: no-store` are not kept.
        capture_fraction: share of requests to keep: 0 to 1 (all).
        capture_max_bytes: most bytes that the folder holds; the oldest are deleted first. A token takes about
            five bytes.
        capture_redact: function that is called with each completion before it is kept; returns it, perhaps
            changed, or None. It runs in a process of its own (`actors/capture/writer_process.py`).
        capture_prompts: keep prompts, too. False keeps answers without their prompts.
        max_metric_labels: number of tenants, and of categories, with labels of their own in metrics
            (`cluster/request/caller.py`), in the order in which they appear. All others count as
            "other". Each is two series in Prometheus. 0 counts all as "other".
        tenants: name that X-Tenant may have, counted separately in metrics; may be repeated, *
            for any. Other names count as "other", unless the request's key has a tenant, or `*`. Use * only
            for a port that only a proxy reaches.
        categories: name that X-Category may have; may be repeated, * for any.
    """

    served_model_name: str | tuple[str, ...] | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Any: JSON
    unknown_params: UnknownParams = "warn"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_auto_tool_choice: bool = True
    reasoning_field_name: ReasoningField | None = None
    enable_per_request_metrics: Annotated[bool, NO_FLAG] = True
    per_request_spec_decode_metrics: Annotated[SpeculationMetrics, NO_FLAG] = "summary"
    sse_keep_alive_interval: float = 0.0
    max_request_bytes: Size = 32 * 1024 * 1024
    max_unread_bytes: Size = 4 * 1024 * 1024
    reader_timeout: float = 300.0
    max_requests_per_key: int | None = None
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    api_key_file: Annotated[str | None, Flag(metavar="FILE")] = None
    admin_api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    admin_api_key_file: Annotated[str | None, Flag(metavar="FILE")] = None
    metrics_api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    metrics_api_key_file: Annotated[str | None, Flag(metavar="FILE")] = None
    allowed_origins: tuple[str, ...] = ()
    prefix_cache_isolation: Isolation | None = None
    # A URL may hold secrets.
    batch_storage: Annotated[FolderPath | None, Flag(metavar="FOLDER|URL")] = field(default=None, repr=False)
    max_batch_file_bytes: Annotated[int, NO_FLAG] = 200 * 10**6
    max_stored_bytes: Size = 10 * 10**9
    max_batch_lines: Annotated[int, NO_FLAG] = 50_000
    replicas: Annotated[int | str, Flag("--replicas --data-parallel-size -dp", metavar="N|LEAST:MOST")] = 1
    shutdown_timeout: float = 900.0
    scaling: Annotated[ScalingRules, NO_FLAG] = field(default_factory=ScalingRules)
    ui: bool = True
    log_format: LogFormat = "text"
    otlp_traces_endpoint: Annotated[str | None, Flag(metavar="URL")] = field(default=None, repr=False)
    lossless_audit: Annotated[float, Flag(metavar="SHARE")] = 0.0
    capture: FolderPath | None = None
    capture_fraction: Annotated[float, Flag(metavar="SHARE")] = 1.0
    capture_max_bytes: Size = 2**30
    capture_redact: Annotated[str | None, Flag(metavar="MODULE:FUNCTION")] = None
    capture_prompts: bool = True
    max_metric_labels: Annotated[int, NO_FLAG] = 64
    tenants: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "admin_api_key", "metrics_api_key", *_NAMES):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name in _NAMES:
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
        for name in ("api_key", "admin_api_key", "metrics_api_key"):
            _check_keys(name, _as_tuple(getattr(self, name)))
        for name in ("tenants", "categories"):
            for at, value in enumerate(getattr(self, name)):
                _check_label(f"{name}.{at}", value)
        for name, kind in (
            ("unknown_params", UnknownParams),
            ("per_request_spec_decode_metrics", SpeculationMetrics),
            ("log_format", LogFormat),
        ):
            one_of(name, getattr(self, name), get_args(kind))
        for name, kind in (("prefix_cache_isolation", Isolation), ("reasoning_field_name", ReasoningField)):
            if (value := getattr(self, name)) is not None:
                one_of(name, value, get_args(kind))
        GenerationDefaults().overridden(self.override_generation_config)
        source = self.generation_config
        if source not in ("auto", "openai") and not Path(source, "generation_config.json").is_file():
            raise ConfigError(
                f"generation_config={source!r} must be auto (the checkpoint's), openai (none), or a folder "
                "that holds a generation_config.json.",
                param="generation_config",
            )
        for name, at_zero in (
            ("sse_keep_alive_interval", "off"),
            ("shutdown_timeout", "at once"),
            ("reader_timeout", "never"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} must be 0 ({at_zero}) or seconds.", param=name
                )
        for name, minimum in LEAST.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least {minimum}.", param=name)
        if self.max_requests_per_key is not None and self.max_requests_per_key < 1:
            raise ConfigError(
                f"max_requests_per_key={self.max_requests_per_key!r} must be at least 1; leave it out for no "
                "limit.",
                param="max_requests_per_key",
            )
        for name in ("lossless_audit", "capture_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} must be a share of all answers, from 0 (none) to 1.",
                    param=name,
                )
        if self.capture is not None and not Path(self.capture).is_absolute():
            raise ConfigError(
                f"capture={self.capture!r} must be the absolute path of a folder.", param="capture"
            )
        if self.capture_redact is not None and not _HOOK.fullmatch(self.capture_redact):
            raise ConfigError(
                f"capture_redact={self.capture_redact!r} must name a function, like mymodule:redact.",
                param="capture_redact",
            )
        if self.otlp_traces_endpoint is not None:
            _check_collector(self.otlp_traces_endpoint)
        if self.batch_storage is not None:
            _check_place(self.batch_storage)
        parse_replicas(self.replicas)
        if isinstance(self.scaling, Mapping):
            object.__setattr__(self, "scaling", from_mapping(ScalingRules, self.scaling, "scaling."))

    def model_names(self, model: str) -> tuple[str, ...]:
        return _as_tuple(self.served_model_name) or (served_name(model),)

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the keys of `api_key`, `admin_api_key` or `metrics_api_key`."""
        return tuple(self.key_tenants(name))

    def key_tenants(self, name: str) -> dict[str, str | None]:
        """Map a setting's keys to their tenants: None without one, ANY if requests may name any."""
        found = (_KEY.fullmatch(entry) for entry in _as_tuple(getattr(self, name)))
        return {entry[1]: entry[2] for entry in found if entry is not None}

    @property
    def has_several_keys(self) -> bool:
        return len({*self.keys("api_key"), *self.keys("admin_api_key")}) > 1

    @property
    def isolation(self) -> Isolation:
        """Return `prefix_cache_isolation` or, if unset, "key" with several keys, else "none"."""
        return self.prefix_cache_isolation or ("key" if self.has_several_keys else "none")


def wants_gateway(replicas: int | str) -> bool:
    """Return whether replicas have a gateway; a single fixed one has none, unless written "1:1"."""
    return ":" in str(replicas) or parse_replicas(replicas) != (1, 1)


def parse_replicas(replicas: int | str) -> tuple[int, int]:
    """Return the minimum and maximum number of replicas; equal if fixed."""
    minimum, _, maximum = str(replicas).partition(":")
    maximum = maximum if ":" in str(replicas) else minimum
    if isinstance(replicas, bool) or not (minimum.isdecimal() and maximum.isdecimal()):
        bounds = None
    else:
        bounds = int(minimum), int(maximum)
    if bounds is None or bounds[1] < 1 or bounds[0] > bounds[1]:
        raise ConfigError(
            f'replicas={replicas!r} must be a number of at least 1, or "least:most" like "1:4".',
            param="replicas",
        )
    return bounds


def _check_keys(name: str, entries: tuple[str, ...]) -> None:
    for entry in entries:
        if (found := _KEY.fullmatch(entry)) is None:
            raise ConfigError(
                f"{name}: a key must be printable ASCII without spaces, and not empty. A space and the "
                "tenant of its requests, or *, may follow it.",
                param=name,
            )
        if found[2] is not None:
            _check_label(name, found[2])


def _check_label(name: str, value: str) -> None:
    if value != ANY and not is_label(value):
        raise ConfigError(
            f"{name}: {brief(value)} is no valid label: it must have up to 64 letters, digits and _.:@/+-, "
            'and not be "none" or "other"; * means any name.',
            param=name,
        )


def _check_place(where: str) -> None:
    """Raise ConfigError for a relative path, which each replica would resolve differently."""
    if "://" not in where and not Path(where).is_absolute():
        raise ConfigError(
            f"batch_storage={brief_url(where)} must be an absolute path that all replicas see, or a URL.",
            param="batch_storage",
        )


def _check_collector(url: str) -> None:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(
            f"otlp_traces_endpoint={brief_url(url)} must be a URL like http://collector:4318/v1/traces (OTLP "
            "over HTTP; gRPC is not spoken).",
            param="otlp_traces_endpoint",
        )


def _as_tuple(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value
