"""Reads YAML files of settings: a Ray Serve config, or a mapping of flag names. Base-60 numbers are refused.

Names outside `args:` are checked here, since Ray Serve ignores unknown ones. The content of `args:` is
checked when it becomes a config (`config_loading.py`). Used by `config_loading.py`, `render/` and `manta
serve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...cluster.errors import ConfigError, did_you_mean

Json = Mapping[str, Any]  # Any: YAML
# Names in Ray Serve's schema (`ray.serve.schema`), listed here to avoid importing Ray; a test compares them.
_TOP = (
    "proxy_location http_options grpc_options controller_options logging_config tracing_config applications "
    "target_capacity"
)
_HTTP = (
    "host port root_path request_timeout_s keep_alive_timeout_s ssl_keyfile ssl_certfile "
    "ssl_keyfile_password ssl_ca_certs"
)
_APPLICATION = (
    "name route_prefix import_path runtime_env host port deployments autoscaling_policy args logging_config "
    "external_scaler_enabled"
)
TOP_KEYS, HTTP_KEYS, APPLICATION_KEYS = (frozenset(names.split()) for names in (_TOP, _HTTP, _APPLICATION))
ADDRESS = ("host", "port")
# Keys that `manta serve` uses, or whose effect it has anyway.
_USED = {"proxy_location", "applications", "name", "import_path", "args", *ADDRESS}
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Settings and address in a file; `unused` are dotted keys that only `serve deploy` uses."""

    settings: Json
    address: Json
    unused: tuple[str, ...] = ()


def read_config_file(path: Path) -> ConfigFile:
    found = read_yaml(path)
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"config: {path} must be a mapping of settings, or a Serve config with applications[0].args.",
            param="config",
        )
    if not TOP_KEYS & found.keys():
        settings = {key: value for key, value in found.items() if key not in ADDRESS}
        return ConfigFile(settings, _address(found, path, ""))
    check_serve_config(found, path)
    http, first = found.get("http_options") or {}, found["applications"][0] or {}
    if not isinstance(first.get("args") or {}, Mapping):
        raise ConfigError(f"config: {path}: applications[0].args must be a mapping.", param="config")
    return ConfigFile(
        first.get("args") or {}, _address(http, path, "http_options."), tuple(_unused(found, http, first))
    )


def check_serve_config(found: Any, path: Path) -> None:  # Any: YAML
    """Raise ConfigError unless `found` is a Serve config without names that Serve would ignore."""
    found = found if isinstance(found, Mapping) else {}
    _check_known(found, TOP_KEYS, path, "")
    _check_known(found.get("http_options"), HTTP_KEYS, path, "http_options.")
    applications = found.get("applications")
    if not isinstance(applications, list) or not applications:
        raise ConfigError(
            f"config: {path} is not a Serve config: `applications` must be a list whose first item has "
            "`args`, as in ray_config.yaml and in the output of `manta plan -o`.",
            param="config",
        )
    for i, application in enumerate(applications):
        _check_known(application, APPLICATION_KEYS, path, f"applications[{i}].")


def _check_known(found: Any, names: frozenset[str], path: Path, prefix: str) -> None:
    name = prefix.rstrip(".")
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"config: {path}: {name} must be a mapping.", param=name)
    for key in found or ():
        if key not in names:
            where = f"in `{name}`" if prefix else "at the top level"
            fallback = "Settings of the engine and of the server belong under `args:`."
            hint = did_you_mean(str(key), sorted(names), prefix=prefix, fallback=fallback)
            raise ConfigError(
                f"Unknown setting {prefix}{key} of {path}, {where} and outside `args:`. {hint}",
                param=f"{prefix}{key}",
            )


def _address(found: Json, path: Path, prefix: str) -> dict[str, Any]:
    address = {name: found[name] for name in ADDRESS if found.get(name) is not None}
    port, host = address.get("port", 1), address.get("host", "")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 1 << 16:
        raise ConfigError(f"{prefix}port={port!r} in {path} must be a number from 1 to 65535.", param="port")
    if not isinstance(host, str):
        raise ConfigError(
            f"{prefix}host={host!r} in {path} must be an address, such as 127.0.0.1.", param="host"
        )
    return address


def _unused(found: Json, http: Json, first: Json) -> Iterator[str]:
    for prefix, keys in (("", found), ("http_options.", http), ("applications[0].", first)):
        for key, value in keys.items():
            is_default = key == "route_prefix" and value == "/"
            if value and not is_default and key not in _USED and key != "http_options":
                yield f"{prefix}{key}"
    if len(found["applications"]) > 1:
        yield "applications[1:]"


class _SixtiesError(yaml.YAMLError):
    """A value that YAML 1.1 reads as a base-60 number, which is never intended (`replicas: 1:4` is 64)."""

    def __init__(self, node: yaml.Node) -> None:
        self.line: int = node.start_mark.line + 1
        written = node.value
        super().__init__(f'{written} without quotes is a base-60 number in YAML. Write "{written}".')


class _Loader(yaml.SafeLoader):
    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:  # Any: yaml's own
        if node.tag in _NUMBERS and ":" in node.value:
            raise _SixtiesError(node)
        return super().construct_scalar(node)


def read_yaml(file: Path) -> Any:  # Any: YAML
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(
            f"config: {file} cannot be read: {error.strerror}. Name a YAML file with --config.",
            param="config",
        ) from None
    except _SixtiesError as error:
        raise ConfigError(f"config: {file}, line {error.line}: {error}", param="config") from None
    except RecursionError:
        raise ConfigError(f"config: {file} is nested too deeply.", param="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"config: {file} is not valid YAML: {where}", param="config") from None


def check_new_file(file: Path, *, force: bool) -> None:
    """Raise ConfigError if a file that may have been edited by hand would be replaced."""
    if file.exists() and not force:
        raise ConfigError(
            f"output: {file} exists already. Give another name, or --force to replace it.", param="output"
        )
