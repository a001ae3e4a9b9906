"""Command-line flags made from the dataclasses that hold the options.

How an option gets from the terminal to the code that uses it:

1. It is declared once, as a field of a frozen dataclass: `EngineConfig` (cluster/config.py), `ServerSettings`
   (actors/http/config/settings.py) or the options of a command (`BatchOptions`, `AuditOptions`, ...). The
   field has its name, type and default. Its entry under `Attributes:` describes it: `--help` shows the first
   sentence, the reference all of it. A `Flag` (cluster/flag.py) in the type's annotation adds other spellings
   or a parser.
   2. A command uses the dataclass as the type of a parameter: `def audit(options: AuditOptions, config:
      EngineConfig)`. `with_flags` replaces this parameter by an option for each field in typer's view.
   3. typer parses the command line. `with_flags` makes the dataclass from the values and calls the command.

   The settings of the engine and of the server can also be in a YAML file. Their flags have no defaults, so
   that given flags take precedence over the file (`config_loading.py`). A command receives them by the type
   of its parameter:

       config: EngineConfig      the engine's settings, validated
       settings: Settings        the same as a mapping, with the server's settings in the file
       flags: EngineFlags        the engine's flags that were given, without the file
       server: ServerFlags       the server's flags that were given
       sampling: SamplingFlags   fields of `SamplingParams` that were given

   Imports neither torch nor Ray, so that `--help` is fast; the modules with commands' options must not
   either.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from ...actors.http.config.settings import ServerSettings
from ...cluster.config import DraftMethod, EngineConfig
from ...cluster.flag import NO_FLAG, Flag
from ...cluster.json_text import parse_json
from ...cluster.request.request import SamplingParams
from .command_groups import HTTP, KEYS, MEMORY, MODEL, MOST_USED, OPERATION, SAMPLING, SPECULATION
from .config_loading import engine_config, merge_settings

# Panels of `--help` that differ from their dataclass's; the ten most used flags come first.
_PANELS = {
    MOST_USED: "spec_model spec_method served_model_name host port tensor_parallel_size max_model_len "
    "max_num_seqs quantization api_key_file",
    MEMORY: "kv_cache_dtype kv_cache_memory_bytes gpu_memory_utilization num_pages num_states page_size "
    "max_num_batched_tokens kv_tier_path kv_tier_bytes kv_tier_host_bytes enable_prefix_caching "
    "enable_chunked_prefill",
    HTTP: "plain_proxy probe_port",
    KEYS: "api_key admin_api_key admin_api_key_file metrics_api_key metrics_api_key_file tenants "
    "max_requests_per_key prefix_cache_isolation allowed_origins",
    OPERATION: "scheduling_policy async_scheduling max_num_queued_reqs num_threads seed replicas "
    "shutdown_timeout log_format otlp_traces_endpoint lossless_audit capture capture_fraction "
    "capture_max_bytes capture_redact capture_prompts categories",
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}
_ENTRY = re.compile(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")  # of a section of a docstring
# Up to the first full stop that is followed by a new sentence.
_FIRST_SENTENCE = re.compile(r".+?\.(?= [A-Z0-9\"'`]|$)")

# Any in this module: fields, types and values of dataclasses.
Command = Callable[..., None]
Options = Mapping[str, inspect.Parameter]

# The target as an argument of a command, besides `--model`.
Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", show_default=False, help="Target checkpoint (or --model).")
]


def with_flags(command: Command) -> Command:
    """Replace each parameter of `command` that is made from flags by these flags, for typer."""
    parameters = inspect.signature(command, eval_str=True).parameters
    groups = {name: group for name, each in parameters.items() if (group := _group(each.annotation))}

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        if (model := arguments.pop("model_", None)) is not None:
            if arguments["model"] is not None:
                raise typer.BadParameter("Give the model as an argument or with --model, not both.")
            arguments["model"] = model
        values = {
            name: group.build({option: arguments.pop(option) for option in group.options})
            for name, group in groups.items()
        }
        command(**values, **arguments)

    shown = [
        option
        for name, each in parameters.items()
        for option in (groups[name].options.values() if name in groups else (each,))
    ]
    # Keyword-only, so that any order of defaults is valid.
    signature = inspect.Signature([each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shown])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    return wrapped


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags that become one argument of a command, which `build` makes from their values."""

    options: Options
    build: Callable[[dict[str, Any]], Any]


def _group(kind: Any) -> FlagGroup | None:
    if get_origin(kind) is Annotated:
        return next((each for each in get_args(kind) if isinstance(each, FlagGroup)), None)
    if kind is EngineConfig:
        return FlagGroup(ENGINE_OPTIONS, lambda values: engine_config(_merged_with_file(values)))
    return FlagGroup(options_of(kind), functools.partial(_make, kind)) if is_dataclass(kind) else None


def _make(kind: Any, values: Mapping[str, Any]) -> Any:
    """Make a dataclass from its flags' values; None means the field's default."""
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in given(values).items()})


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, [])}


def given_flags(options: Options) -> FlagGroup:
    return FlagGroup(options, given)


def options_of(
    kind: Any, panel: str | None = None, *, defaults: bool = True, only: Mapping[str, Flag] | None = None
) -> Options:
    """Return a typer parameter for each field of a dataclass that has a flag.

    `panel` is the heading in `--help`, unless `_PANELS` gives the field another; None: no panel.

    With `defaults` False, a flag that is not given has the value None. `only` has flags by field that are not
    declared in the types' annotations.
    """
    types = get_type_hints(kind, include_extras=True)
    descriptions: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        descriptions |= described(each.__doc__, "Attributes:")
    found: dict[str, inspect.Parameter] = {}
    for field in fields(kind):
        value, repeats, flag = _read_type(types[field.name])
        flag = flag if only is None else only.get(field.name, NO_FLAG)
        if not flag.absent:
            default = _default(field, repeats) if defaults else None
            text = descriptions.get(field.name, "")
            shown_in = None if panel is None else _PANEL_OF.get(field.name, panel)
            shown = _typer_parameter(field.name, value, flag, text, shown_in, default)
            value = list[value] if repeats else value
            found[field.name] = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[value | None if default is None else value, shown],
            )
    return found


def _read_type(hint: Any) -> tuple[Any, bool, Flag]:
    """Return the type of one value, whether the flag may be repeated, and the `Flag` in the annotation.

    A tuple is a flag that may be repeated, a mapping is JSON. For `int | str` the flag takes text, for
    `str | tuple[str, ...]` it may be repeated.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, repeats, flag = _read_type(inner[0])
        for annotation in inner[1:]:
            flag = _override(flag, annotation)
            if annotation.parser is not None:
                kind, repeats = str, False
        return kind, repeats, flag
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each is not NoneType]
        tuples = (each for each in kinds if get_origin(each) is tuple)
        return _read_type(next(tuples, str if str in kinds else kinds[0]))
    if origin is tuple:
        kind, _, flag = _read_type(inner[0])
        return kind, True, flag
    if origin is Mapping:
        return str, False, Flag(metavar="JSON", parser=parse_object)
    return hint, False, Flag()


def _override(flag: Flag, by: Flag) -> Flag:
    own = {field.name: getattr(by, field.name) for field in fields(Flag)}
    return replace(flag, **{name: value for name, value in own.items() if value != getattr(Flag(), name)})


def _default(field: Field[Any], repeats: bool) -> Any:
    """Return the default for typer: a list if the flag may be repeated; None instead of an empty one."""
    if field.default is MISSING and field.default_factory is MISSING:
        return inspect.Parameter.empty
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return (list(default) if repeats else default) or None if isinstance(default, tuple | dict) else default


def _typer_parameter(name: str, kind: Any, flag: Flag, text: str, panel: str | None, default: Any) -> Any:
    more: dict[str, Any] = {"metavar": flag.metavar, "min": flag.least, "max": flag.most}
    if flag.parser is not None:
        more["parser"] = text_parser(flag.parser)
    text = text[:1].upper() + text[1:]
    sentence = _FIRST_SENTENCE.match(text)
    more |= {"help": sentence[0] if sentence else text, "rich_help_panel": panel}
    if flag.positional:
        return typer.Argument(**more)
    names = flag.names.split()
    if not any(each.startswith("--") for each in names):
        own = name.replace("_", "-")
        # A --no- form is needed only if the value could otherwise be true.
        both = kind is bool and default in (None, True)
        names = [f"--{own}/--no-{own}" if both else f"--{own}", *names]
    return typer.Option(*names, **more)


def described(docstring: str | None, section: str) -> dict[str, str]:
    """Return the entries of a section such as "Attributes:" by name; `a, b: text` describes both."""
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, rest = inspect.cleandoc(docstring or "").partition(f"{section}\n")
    for line in rest.splitlines():
        if entry := _ENTRY.fullmatch(line):
            names = [name.lstrip("*") for name in entry[1].split(", ")]
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith(" " * 8):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif line.strip():
            break
    return found


def text_parser(parser: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a parser for typer, which also calls it with defaults, which are not text."""

    def parse(value: Any) -> Any:
        try:
            return parser(value) if isinstance(value, str) else value
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def parse_object(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is not a JSON object; write it like '{{\"key\": true}}'.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFlag:
    """Flags of the engine that are not fields of `EngineConfig`.

    Attributes:
        config: YAML file: a ray_config.yaml (applications[0].args) or a mapping of flag names. Flags take
            precedence; without --config and --model, ./ray_config.yaml is read.
    """

    config: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFlags:
    """Flags for a `SpeculativeConfig`, as JSON or by field (`config_loading.merge_speculation`).

    Attributes:
        speculative_config: JSON: '{"model": DRAFTER, "num_speculative_tokens": 15, "placement":
            "colocated"}'; none disables speculation.
        spec_model: drafter checkpoint (instead of --speculative-config).
        spec_method: drafting method: dflash (the default), eagle3, or mtp (the target's own layer for
            multi-token prediction; for Gemma 4 an assistant as --spec-model), suffix and ngram, which need
            no --spec-model.
        spec_tokens: drafts per step (num_speculative_tokens), at most the drafter's block size - 1 (the
            default: 15 for a block of 16, because the first slot holds the last accepted token; SGLang's
            --speculative-num-draft-tokens counts this slot, too: its 16 is 15 here); 5 for eagle3, 3 for
            mtp, 16 for suffix, 8 for ngram.
        no_speculation: disable speculation, also if the YAML file has a drafter.
    """

    speculative_config: Annotated[str | None, Flag("-sc")] = None
    spec_model: Annotated[str | None, Flag("--spec-model --drafter")] = None
    spec_method: DraftMethod | None = None
    spec_tokens: int | None = None
    no_speculation: Annotated[bool, Flag("--no-speculation")] = False


# `SamplingParams` is also used by requests and in Python, so its flags are declared here.
_SAMPLING = {
    **{name: Flag() for name in ("max_tokens", "min_tokens", "top_p", "top_k", "min_p", "stop")},
    "temperature": Flag("-t"),
    "ignore_eos": Flag("--ignore-eos"),
}

SPECULATION_OPTIONS = options_of(SpeculationFlags, SPECULATION, defaults=False)
ENGINE_OPTIONS: Options = {
    **options_of(ConfigFlag, MODEL, defaults=False),
    **options_of(EngineConfig, MODEL, defaults=False),
    **SPECULATION_OPTIONS,
}


def _merged_with_file(values: Mapping[str, Any]) -> dict[str, Any]:
    flags = given(values)
    return merge_settings(flags, flags.pop("config", None))


def _server_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    flags = given(values)
    if "allowed_origins" in flags:
        flags["allowed_origins"] = _listed(flags["allowed_origins"])
    return flags


def _listed(values: Sequence[str]) -> list[str]:
    """Return values with JSON lists expanded, as in vLLM's --allowed-origins."""
    try:
        return [item for value in values for item in (parse_json(value) if value[:1] == "[" else [value])]
    except ValueError:
        raise typer.BadParameter(
            f"--allowed-origins: {values!r} contains a list that is not valid JSON."
        ) from None


Settings = Annotated[dict[str, Any], FlagGroup(ENGINE_OPTIONS, _merged_with_file)]
EngineFlags = Annotated[dict[str, Any], given_flags(ENGINE_OPTIONS)]
ServerFlags = Annotated[
    dict[str, Any], FlagGroup(options_of(ServerSettings, HTTP, defaults=False), _server_flags)
]
SamplingFlags = Annotated[
    dict[str, Any], given_flags(options_of(SamplingParams, SAMPLING, defaults=False, only=_SAMPLING))
]
