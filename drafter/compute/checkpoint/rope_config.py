"""Rotary keys of a config.json, in both of transformers' spellings; `layers/rope.py` defines them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from .hf_config import Count, HfConfig, Json, parse, wrong


@dataclass(frozen=True, slots=True)
class RopeJson:
    """The attributes of `RopeConfig` that a file states; if theta is None the caller has a default."""

    theta: float | None
    kind: str
    scaling: Json
    rotary_dim: int


def read_rope(config: Json, head_dim: int, file: str, layer_type: str | None) -> RopeJson:
    outer = parse(_OuterRopeKeys, config, file)
    at, rope, theta = _of_layer(config, outer, layer_type, file)
    inside = parse(_RopeKeys, rope, file, at)
    theta = inside.rope_theta or theta
    rope.setdefault("max_position_embeddings", outer.max_position_embeddings)
    rotary_dim = 0
    if inside.rope_type == "yarn":
        _fill_yarn(rope, file, at)
    if inside.rope_type == "proportional":
        rope.setdefault("partial_rotary_factor", outer.partial_rotary_factor or 1.0)
    else:
        rotary_dim = _rotary_dim(inside, outer, head_dim, file, at)
    used = {"max_position_embeddings", *_USED[inside.rope_type]}
    return RopeJson(
        theta, inside.rope_type, {key: rope[key] for key in sorted(used & rope.keys())}, rotary_dim
    )


_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

_LENGTH = "original_max_position_embeddings"
# Keys from which each type is computed, in addition to theta.
_USED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor", "mscale_all_dim"),
    "llama3": (*_NEEDED["llama3"], "mscale_all_dim"),
    "yarn": (
        "factor",
        _LENGTH,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "proportional": ("partial_rotary_factor", "factor"),
}

Positive = Annotated[float, Field(gt=0, description="a positive number")]
Base = Annotated[float, Field(gt=1, description="a number above 1")]
Share = Annotated[float, Field(gt=0, le=1, description="above 0 and at most 1")]


class _OuterRopeKeys(HfConfig):
    """Keys at the level of `rope_parameters` or `rope_scaling`."""

    rope_theta: Base | None = None
    local_theta: Base | None = Field(
        None, validation_alias=AliasChoices("rope_local_base_freq", "swa_rope_theta")
    )
    partial_rotary_factor: Share | None = None
    rotary_dim: Count | None = None
    max_position_embeddings: Count | None = None
    original_max_position_embeddings: Count | None = None
    rope_parameters: dict[str, Any] | None = None  # Any: JSON values
    rope_scaling: dict[str, Any] | None = None


class _RopeKeys(HfConfig):
    """Keys inside one of these two, or inside its object for a layer type."""

    rope_type: Literal["default", "linear", "llama3", "yarn", "proportional"] = Field(
        "default",
        validation_alias=AliasChoices("rope_type", "type"),
        description=f"one of {', '.join(_KINDS)}: others are not supported",
    )
    rope_theta: Base | None = None
    partial_rotary_factor: Share | None = None
    factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _is_complete(self) -> _RopeKeys:
        for key in _NEEDED.get(self.rope_type, ()):
            if getattr(self, key) is None:
                raise ValueError(f"{key} must be given for rope type {self.rope_type!r}")
        return self


def _of_layer(
    config: Json, outer: _OuterRopeKeys, layer_type: str | None, file: str
) -> tuple[str, dict[str, Any], float | None]:  # Any: JSON values
    """Return the path of a layer type's settings, the settings, and the theta outside them.

    As in transformers, `rope_scaling` precedes `rope_parameters`, and full attention's settings per type.
    """
    scaling, parameters = (_read_settings(config, key, file) for key in ("rope_scaling", "rope_parameters"))
    at, found = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    if layer_type is not None and _by_type(parameters) and not _by_type(scaling):
        full = parameters.get("full_attention") or {}
        at, found = "rope_parameters", {**parameters, "full_attention": {**full, **scaling}}
    by_type = _by_type(found)
    sliding = layer_type == "sliding_attention"
    if not by_type:
        if sliding:
            return at, {}, outer.local_theta
        if outer.original_max_position_embeddings is not None:  # takes precedence over the inner one
            found["original_max_position_embeddings"] = outer.original_max_position_embeddings
        return at, found, outer.rope_theta
    if layer_type is None:
        raise wrong(file, at, found, "one setting for all layers: several are not supported here")
    if layer_type not in by_type:
        raise wrong(file, f"{at}.{layer_type}", None, "an object with the rotary settings of these layers")
    theta = outer.local_theta if sliding else None
    return f"{at}.{layer_type}", _stated(by_type[layer_type]), theta or outer.rope_theta


def _read_settings(config: Json, key: str, file: str) -> dict[str, Any]:  # Any: JSON values
    """Return the settings under a key, empty without any. Unknown ones are refused even if unused."""
    found = _stated(config.get(key) or {})
    by_type = {f"{key}.{name}": value for name, value in _by_type(found).items()} or {key: found}
    for at, settings in by_type.items():
        parse(_RopeKeys, settings, file, at)
    return found


def _by_type(settings: Json) -> dict[str, Json]:
    return {key: value for key, value in settings.items() if isinstance(value, dict)}


def _stated(settings: Json) -> dict[str, Any]:  # Any: JSON values
    return {key: value for key, value in settings.items() if value is not None}


def _fill_yarn(rope: dict[str, Any], file: str, at: str) -> None:  # Any: JSON values
    """Fill in YaRN's original length and factor from `max_position_embeddings` if absent."""
    length = rope["max_position_embeddings"]
    original = rope.setdefault("original_max_position_embeddings", length)
    if original is None:
        key = f"{at}.original_max_position_embeddings"
        raise wrong(file, key, None, "given for rope type 'yarn', or else max_position_embeddings")
    rope.setdefault("factor", (length or original) / original)


def _rotary_dim(inside: _RopeKeys, outer: _OuterRopeKeys, head_dim: int, file: str, at: str) -> int:
    """Return the rotated dimensions (`partial_rotary_factor`, MiniMax's `rotary_dim`); 0 is all."""
    for key, value in (
        (f"{at}.partial_rotary_factor", inside.partial_rotary_factor),
        ("partial_rotary_factor", outer.partial_rotary_factor),
        ("rotary_dim", outer.rotary_dim),
    ):
        if value is None:
            continue
        dim = int(value if key == "rotary_dim" else head_dim * value)
        if dim % 2 or not 2 <= dim <= head_dim:
            raise wrong(file, key, value, f"an even part of a head's {head_dim} dimensions")
        return dim % head_dim
    return 0
