"""Splits one flat mapping into the settings of the engine and of the HTTP server, for each model.

`ray_config.yaml` (`args:`) and the command line yield one mapping. Settings of Serve itself (ports, routes)
are not here: they are Serve's own keys next to `args:`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ....cluster.config import EngineConfig, from_mapping
from ....cluster.errors import ConfigError, did_you_mean
from ....cluster.vllm_settings import accept
from .settings import ServerSettings

# Settings of the whole endpoint; its models cannot differ in them.
ENDPOINT_SETTINGS = frozenset(
    {
        *("api_key", "api_key_file", "admin_api_key", "admin_api_key_file", "allowed_origins"),
        *("prefix_cache_isolation", "tenants", "categories"),
        *("metrics_api_key", "metrics_api_key_file"),
        *("max_request_bytes", "batch_storage", "shutdown_timeout", "ui"),
        *("max_requests_per_key", "max_unread_bytes", "reader_timeout"),
        *("log_format", "otlp_traces_endpoint"),
    }
)


def split_settings(args: Mapping[str, Any]) -> tuple[EngineConfig, ServerSettings]:
    """Split one mapping. Raises ConfigError for an unknown key, with a suggestion."""
    args = accept(args)
    server_names = {f.name for f in fields(ServerSettings)}
    engine_names = {f.name for f in fields(EngineConfig)}
    if "models" in args:
        raise ConfigError("models: only a server has several; give one `model` here.", param="models")
    for key in args:
        if key not in server_names | engine_names:
            known = sorted(server_names | engine_names)
            hint = did_you_mean(str(key), known, fallback="See ray_config.yaml for the known ones.")
            raise ConfigError(f"Unknown setting {key}. {hint}", param=str(key))
    if not args.get("model"):
        raise ConfigError("model is missing: give the target's folder, GGUF file or hub id.", param="model")
    engine = EngineConfig.from_dict({k: v for k, v in args.items() if k in engine_names})
    return engine, from_mapping(ServerSettings, {k: v for k, v in args.items() if k in server_names})


def split_models(args: Mapping[str, Any]) -> list[tuple[EngineConfig, ServerSettings]]:
    """Apply `split_settings` to each model of one endpoint, at least one.

    `models:` lists mappings, each of which overrides the settings next to it. Raises ConfigError if a setting
    is unknown or wrong, or two models have the same name.
    """
    if "models" not in args:
        return [split_settings(args)]
    common = {key: value for key, value in args.items() if key != "models"}
    found = [split_settings({**common, **entry}) for entry in _entries(args["models"], common)]
    owners: dict[str, int] = {}
    for i, (engine, server) in enumerate(found):
        for name in server.model_names(engine.model):
            if owners.setdefault(name, i) != i:
                raise ConfigError(
                    f"models.{i}: {name!r} is the name of another model, too. Give each a served_model_name.",
                    param=f"models.{i}.served_model_name",
                )
    return found


def _entries(models: Any, common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of `models`. Raises ConfigError if one has a setting of the whole endpoint."""
    if not isinstance(models, list) or not models or not all(isinstance(each, Mapping) for each in models):
        raise ConfigError("models must be a list of mappings, each with a `model`.", param="models")
    for i, entry in enumerate(models):
        for name in ENDPOINT_SETTINGS & entry.keys():
            raise ConfigError(
                f"models.{i}.{name} applies to the whole endpoint: write it next to `models`.",
                param=f"models.{i}.{name}",
            )
    if "batch_storage" in common and len(models) > 1:
        raise ConfigError(
            "batch_storage needs an endpoint with one model: serve each model with batches as a separate "
            "application.",
            param="batch_storage",
        )
    if common.get("capture") and len(models) > 1:
        raise ConfigError(
            "capture stores the token ids of one model: set it under each captured entry of `models`, with a "
            "separate folder.",
            param="capture",
        )
    return models
