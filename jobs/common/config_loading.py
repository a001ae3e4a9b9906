"""Merges flags and a YAML file into engine settings, for all commands.

`config_file.py` reads the file; flags take precedence. The flags themselves are defined in `engine_flags.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...actors.http.config.settings_mapping import split_settings
from ...actors.http.middleware.api_keys import refuse_written_keys
from ...actors.tokenization.generation_config import DEFAULT_MAX_TOKENS
from ...cluster.config import EngineConfig, SpeculativeConfig, from_mapping
from ...cluster.errors import ConfigError
from ...cluster.json_text import parse_json
from ...cluster.request.request import SamplingParams
from ...cluster.vllm_settings import accept, accept_speculation
from .config_file import read_config_file

DEFAULT_CONFIG = Path("ray_config.yaml")
# Flag -> key of `speculative_config` that it sets.
_REFINED = {"spec_model": "model", "spec_method": "method", "spec_tokens": "num_speculative_tokens"}
_SPECULATION_FLAGS = ("speculative_config", *_REFINED, "no_speculation")


# Any in this module: settings from YAML and flags are plain data, validated by EngineConfig.
def merge_settings(flags: Mapping[str, Any], config_path: Path | None = None) -> dict[str, Any]:
    """Return one flat mapping of flags and the YAML file (./ray_config.yaml without file and model)."""
    given = {name: value for name, value in flags.items() if value is not None}
    config_path = used_config(config_path, given.get("model"))
    settings = read_settings(config_path) if config_path is not None else {}
    speculation = {name: given.pop(name) for name in _SPECULATION_FLAGS if name in given}
    settings |= given
    settings["speculative_config"] = merge_speculation(settings.get("speculative_config"), speculation)
    if not settings.get("model") and not settings.get("models"):
        raise ConfigError(
            "model is missing: give the target's folder, GGUF file or hub id (--model) or a YAML file "
            "(--config). The shipped pair is --model models/target --spec-model models/drafter.",
            param="model",
        )
    return settings


def used_config(given: Path | None, model: object) -> Path | None:
    """Return the given YAML file, or the working directory's if no model is given, if there is one."""
    return DEFAULT_CONFIG if given is None and model is None and DEFAULT_CONFIG.is_file() else given


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's part of merged settings; an unknown name is an error that suggests a known one."""
    return split_settings(settings)[0]


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **given})


def read_settings(path: Path) -> dict[str, Any]:
    settings = accept({str(k).replace("-", "_"): item for k, item in read_config_file(path).settings.items()})
    refuse_written_keys(settings, f"{path}, as any Serve config,")
    speculation = {name: settings.pop(name) for name in _SPECULATION_FLAGS if name in settings}
    return settings | {"speculative_config": merge_speculation(None, speculation)}


def merge_speculation(base: Any, flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the speculation of flags over that of a file; None if it is off.

    A flag for all of it replaces the file's, flags for single fields (`spec_model`, ..) refine what is there.
    """
    given = flags.get("speculative_config")
    refined = {key: flags[flag] for flag, key in _REFINED.items() if flags.get(flag) is not None}
    off = bool(flags.get("no_speculation"))
    if off and (given is not None or refined):
        raise ConfigError(
            "no_speculation excludes speculative_config, spec_model, spec_method and spec_tokens.",
            param="no_speculation",
        )
    if off:
        return None
    config = parse_speculation(given if given is not None else base)
    if not refined:
        return config
    if given is not None and (twice := sorted(refined.keys() & (config or {}).keys())):
        raise ConfigError(
            f"speculative_config.{twice[0]} is also given as a flag of its own. Give one of them.",
            param=f"speculative_config.{twice[0]}",
        )
    config = (config or {}) | refined
    if "model" not in config and config.get("method") not in ("mtp", "ngram", "suffix"):
        raise ConfigError(
            "The drafter is missing: give spec_model, too, or spec_method mtp or suffix.", param="spec_model"
        )
    return config


def parse_speculation(value: Any) -> dict[str, Any] | None:
    """Read a speculative config from a mapping, JSON text, or "none" for plain decoding."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null", "off", "")):
        return None
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ConfigError(
                f"speculative_config={value!r} is not JSON ({error}). Write it like "
                '\'{"model": "models/drafter", "num_speculative_tokens": 15}\', or none.',
                param="speculative_config",
            ) from None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"speculative_config={value!r} must be a mapping with the drafter's `model`, or none.",
            param="speculative_config",
        )
    config = accept_speculation({str(key).replace("-", "_"): item for key, item in value.items()})
    from_mapping(SpeculativeConfig, config, "speculative_config.")
    return config
