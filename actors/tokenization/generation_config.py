"""Sampling defaults from a checkpoint's `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...cluster.config import EngineConfig
from ...cluster.errors import CheckpointError, ConfigError, RequestError, brief, did_you_mean
from ...cluster.request.request import SamplingParams
from ...drafter.compute.checkpoint.hf_config import read_json
from ..checkpoints.checkpoint_paths import target_folder

DEFAULT_MAX_TOKENS = 256  # for commands and rows of a dataset
# Keys of generation_config.json -> field of GenerationDefaults.
KEYS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @classmethod
    def of_source(cls, source: str, config: EngineConfig) -> GenerationDefaults:
        """Return the defaults of `ServerSettings.generation_config`: auto, openai, or another folder."""
        if source == "openai":
            return cls()
        return cls.load(target_folder(config) if source == "auto" else Path(source))

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """Raises CheckpointError if the file is not a JSON object or has a wrong value."""
        param = "generation_config"
        found = read_json(folder, "generation_config.json", param=param, required=False)
        fields = {field: found.get(key) for key, field in KEYS.items()}
        try:
            SamplingParams(**{field: value for field, value in fields.items() if value is not None})
        except RequestError as error:
            raise CheckpointError(
                f"{param}: {folder / 'generation_config.json'}: {error} Fix it, or set generation_config: "
                "openai to do without it.",
                param=param,
            ) from error
        return cls(**fields)

    def overridden(self, values: Mapping[str, Any]) -> GenerationDefaults:  # Any: JSON
        """Replace the defaults for some keys of that file. Raises ConfigError if one is not valid."""
        param = "override_generation_config"
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{param}={brief(values)} must be a mapping, as {{temperature: 0.6}}.", param=param
            )
        for key in values:
            if key not in KEYS:
                raise ConfigError(
                    f"{param}.{key}: no such default. {did_you_mean(str(key), KEYS)}", param=param
                )
        fields = {KEYS[key]: value for key, value in values.items()}
        try:
            SamplingParams(**fields)
        except RequestError as error:
            raise ConfigError(f"{param}={brief(dict(values))}: {error}", param=param) from None
        return replace(self, **fields)
