"""Hugging Face's config.json as pydantic models with strict fields and errors that name file and field.

A field's `description` completes the sentence "must be ..."; without one its type is described. A validator
raises `ValueError("must be ...")`; one of a whole model names the key: `ValueError("head_dim must be even")`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from ....cluster.errors import CheckpointError, ConfigError, did_you_mean
from ....cluster.json_text import parse_json

Json = Mapping[str, Any]  # Any: JSON values
T = TypeVar("T", bound="HfConfig")
R = TypeVar("R")

_INHERITED = ("architectures", "eos_token_id", "tie_word_embeddings", "quantization_config")
_DTYPES = ("dtype", "torch_dtype")  # new and old spelling
_DEPTH = "num_hidden_layers"
_MAX_SHOWN = 200  # characters of a value in a message


def read_json(folder: Path, name: str = "config.json", *, param: str, required: bool = True) -> Json:
    """Return a JSON file of the folder that the setting `param` names; empty if it may be absent."""
    file = folder / name
    kind = "Hugging Face" if param == "model" else "DFlash"
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise CheckpointError(
            f"{param}: {file} does not exist. Set `{param}` to a folder or hub id of a {kind} checkpoint.",
            param=param,
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{param}: {file} cannot be read as JSON: {error}.", param=param) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{param}: {file} must hold a JSON object.", param=param)
    return cast(Json, value)


def text_config(raw: Json) -> Json:
    """Return the language model's part of a multimodal config.json, with keys of all parts, or `raw`."""
    nested = raw.get("text_config")
    if not isinstance(nested, dict):
        return raw
    own = {key: value for key, value in cast(Json, nested).items() if value is not None}
    inherited = _INHERITED if own.keys() & set(_DTYPES) else (*_INHERITED, *_DTYPES)
    return {key: raw[key] for key in inherited if raw.get(key) is not None} | own


def overridden(raw: Json, overrides: Json, read: Callable[[Json], R], *, param: str) -> R:
    """Read a config.json in which `overrides` replace keys; objects are merged, other values replaced.

    With a smaller num_hidden_layers, lists with an entry per layer are truncated, unless they are overridden
    themselves. ConfigError, naming `param`, for an override without effect that does not repeat the file's
    value: another key takes precedence, or it is misspelled, or belongs to another family.
    """
    merged = _merged(raw, overrides)
    found = read(merged)
    for key in sorted(overrides):
        without = _merged(raw, _less(overrides, key))
        if key in without and without[key] == merged[key]:
            continue
        with suppress(CheckpointError):  # not readable without it: it has an effect
            if read(without) == found:
                why = _why_nothing_changes(merged, without, key, read)
                raise ConfigError(f"{param}: {key}={overrides[key]!r} changes nothing: {why}", param=param)
    return found


def _why_nothing_changes(merged: Json, without: Json, key: str, read: Callable[[Json], object]) -> str:
    paths = [(outer, inner) for outer in sorted(merged) for inner in (*_inner_keys(merged[outer]), None)]
    for outer, inner in paths:
        if outer != key and _outcome(_less(merged, outer, inner), read) != _outcome(
            _less(without, outer, inner), read
        ):
            winner = outer if inner is None else f"{outer}.{inner}"
            return f"{winner} is also given and takes precedence. Override {winner} instead."
    if key in without:
        return "this model does not use it. Leave it out."
    return f"this model's config.json has no such key. {did_you_mean(key, sorted(without))}"


def _outcome(raw: Json, read: Callable[[Json], object]) -> object:
    try:
        return read(raw)
    except CheckpointError as error:
        return error.message


def _inner_keys(value: object) -> list[str]:
    return sorted(cast(Json, value)) if isinstance(value, Mapping) else []


def _less(raw: Json, outer: str, inner: str | None = None) -> Json:
    if inner is None:
        return {name: value for name, value in raw.items() if name != outer}
    return {name: _less(value, inner) if name == outer else value for name, value in raw.items()}


def _merged(raw: Json, overrides: Json) -> Json:
    merged = {**raw, **overrides}
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(raw.get(key), Mapping):
            merged[key] = _merged(raw[key], cast(Json, value))
    was, depth = raw.get(_DEPTH), merged.get(_DEPTH)
    if isinstance(was, int) and isinstance(depth, int) and 0 < depth < was:
        per_layer = {key for key, value in raw.items() if isinstance(value, list) and len(value) == was}
        merged |= {key: raw[key][:depth] for key in per_layer - overrides.keys()}
    return merged


class HfConfig(BaseModel):
    """Base class: unknown keys are ignored, null means absent, no string or bool is a number or vice versa.

    32.0 is an integer. Lists become tuples: fields are `tuple[X, ...]`.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, raw: Any) -> Any:  # Any: JSON values
        return _plain(raw)


Count = Annotated[int, Field(gt=0, description="a positive integer")]
# Numbers of things that are made before tensors are compared with them; far above published models.
Depth = Annotated[int, Field(gt=0, le=1024, description="a positive integer up to 1024")]
ExpertCount = Annotated[int, Field(gt=0, le=8192, description="a positive integer up to 8192")]


def _off(value: Any) -> Literal[False]:  # Any: JSON values
    if value not in (False, 0):
        raise ValueError("must be absent or false: not yet supported")
    return False


# An unsupported feature that would change the mathematics, declared as `key: Off = False`.
Off = Annotated[Any, AfterValidator(_off)]


def parse(model: type[T], raw: Json, file: str, at: str = "") -> T:
    """Validate `raw`, at the dotted path `at` of `file`; the first invalid field raises a CheckpointError."""
    try:
        return model.model_validate(dict(raw))
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
    path, field = _field(model, found["loc"])
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        key, wanted = _sentence(str(cause))
        path = path + key.split(".") if key else path
    elif field is None:
        wanted = "an object"
    else:
        wanted = _described(field.annotation, field)
        if found["type"] in _BOUNDS and wanted in _NOUNS.values():
            wanted = found["msg"].removeprefix("Input should be ")
    raise wrong(file, ".".join([at, *path] if at else path), _value(raw, path), wanted)


def wrong(file: str, key: str, value: object, wanted: str) -> CheckpointError:
    """Return the error for a field of `file` with this dotted path; `wanted` completes "it must be ..."."""
    shown = repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]} ..."
    stated = f"{key} is missing; it" if value is None else f"{key}={shown}"
    return CheckpointError(f"{file}: {stated} must be {wanted}.", param=key)


def _plain(value: Any) -> Any:  # Any: JSON values
    """Drop null keys; convert lists to tuples and integral floats to integers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], FieldInfo | None]:
    path: list[str] = []
    field: FieldInfo | None = None
    inner: type[BaseModel] | None = model
    for part in loc:
        declared = {} if inner is None else inner.model_fields
        fields = {key: f for name, f in declared.items() for key in _keys(name, f)}
        if part not in fields:
            break
        path.append(str(part))
        field = fields[str(part)]
        inner = next((t for t in _members(field.annotation) if _is_model(t)), None)
    return path, field


def keys_of(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(key for name, field in model.model_fields.items() for key in _keys(name, field))


def _keys(name: str, field: FieldInfo) -> tuple[str, ...]:
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
    return tuple(choice for choice in choices if isinstance(choice, str))


def _value(raw: Json, path: list[str]) -> object:
    value: object = raw
    for key in path:
        value = cast(Json, value).get(key) if isinstance(value, Mapping) else None
    return value


def _sentence(message: str) -> tuple[str, str]:
    match = re.fullmatch(r"(?:([\w.]+) )?must be (.*?)\.?", message, re.DOTALL)
    return (match[1] or "", match[2]) if match else ("", f"right: {message}")


# Kinds of pydantic errors that say more than the field's type.
_BOUNDS = (
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "multiple_of",
    "finite_number",
)
_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_PLURALS = {int: "integers", float: "numbers", bool: "booleans", str: "strings"}


def _described(annotation: Any, field: FieldInfo | None = None) -> str:  # Any: type expressions
    if field is not None and field.description:
        return field.description
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        return _described(inner, next((note for note in notes if isinstance(note, FieldInfo)), None))
    members = _members(annotation)
    if members != [annotation]:
        return " or ".join(_described(member) for member in members)
    (member,) = members
    origin = get_origin(member)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in get_args(member))
    if origin is tuple:
        return f"a list of {_PLURALS.get(_bare(get_args(member)[0]), 'values')}"
    return _NOUNS.get(member, "an object")


def _members(annotation: Any) -> list[Any]:  # Any: type expressions
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for member in get_args(annotation) if member is not type(None)]
    return [annotation]


def _bare(annotation: Any) -> Any:  # Any: type expressions
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_model(annotation: Any) -> bool:  # Any: type expressions
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
