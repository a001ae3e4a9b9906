"""A target's config.json, read and checked: shape, family, end tokens. No weights, no tensors.

Called by `loading/plan.py` before anything is loaded; what cannot be served is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ....cluster.errors import CheckpointError
from ....drafter.compute.rope import RopeConfig
from ..families.dense import FAMILIES, Family

Json = Mapping[str, Any]  # Any: JSON values
CheckpointDType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """A target's shape and meaning.

    Attributes:
        architecture: Hugging Face's class name.
        windows: per layer, how many tokens back a row sees; None sees all.
        attention_bias: q, k, v and o projections have biases.
        mlp_bias: gate, up and down projections have biases.
        tied_head: the head is the embedding.
        dtype: of the checkpoint.
        eos_token_ids: end-of-sequence tokens, from generation_config.json if it has any.
    """

    architecture: str
    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    attention_bias: bool
    mlp_bias: bool
    tied_head: bool
    dtype: CheckpointDType
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: Path) -> TargetConfig:
        """Read a checkpoint folder; CheckpointError says what is missing or not supported."""
        raw = _read_json(folder / "config.json", required=True)
        file = str(folder / "config.json")
        family = _family(raw, file)
        _refuse(raw, file)
        heads = _integer(raw, "num_attention_heads", file)
        kv_heads = _integer(raw, "num_key_value_heads", file, heads)
        if heads % kv_heads:
            raise _wrong(file, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        hidden = _integer(raw, "hidden_size", file)
        head_dim = _integer(raw, "head_dim", file, family.head_dim or hidden // heads)
        if head_dim % 2:
            raise _wrong(file, "head_dim", head_dim, "even")
        return cls(
            architecture=raw["architectures"][0],
            family=family,
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size", file),
            num_layers=_integer(raw, "num_hidden_layers", file),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_integer(raw, "vocab_size", file),
            rms_norm_eps=float(raw.get("rms_norm_eps") or family.rms_norm_eps),
            rope=RopeConfig.read(raw, head_dim, file),
            max_position_embeddings=_integer(raw, "max_position_embeddings", file),
            windows=_windows(raw, family, file),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=family.mlp_bias and bool(raw.get("mlp_bias", False)),
            tied_head=bool(raw.get("tie_word_embeddings", False)),
            dtype=_dtype(raw),
            eos_token_ids=_end_tokens(raw, folder),
        )


def _read_json(file: Path, *, required: bool) -> Json:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise CheckpointError(
            f"model: {file} does not exist. Set `model` to a folder or hub id of a Hugging Face checkpoint.",
            param="model",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model: {file} cannot be read as JSON: {error}.", param="model") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"model: {file} must hold a JSON object.", param="model")
    return cast(Json, value)


def _family(raw: Json, file: str) -> Family:
    names: list[str] = raw.get("architectures") or [""]
    if names[0] not in FAMILIES:
        raise _wrong(file, "architectures", names, f"one of {', '.join(FAMILIES)}: others are not served")
    return FAMILIES[names[0]]


def _refuse(raw: Json, file: str) -> None:
    """What would change the mathematics and is not implemented."""
    if raw.get("quantization_config"):
        raise _wrong(
            file,
            "quantization_config",
            raw["quantization_config"],
            "absent: quantised targets are not served, use the unquantised checkpoint",
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise _wrong(file, "hidden_act", raw["hidden_act"], "'silu'")


def _windows(raw: Json, family: Family, file: str) -> tuple[int | None, ...]:
    count = _integer(raw, "num_hidden_layers", file)
    if not (family.sliding_window and raw.get("use_sliding_window") and raw.get("sliding_window")):
        return (None,) * count
    full = _integer(raw, "max_window_layers", file, count)
    derived = ["sliding_attention" if i >= full else "full_attention" for i in range(count)]
    kinds = raw.get("layer_types") or derived
    if len(kinds) != count:
        raise _wrong(file, "layer_types", kinds, f"one entry for each of num_hidden_layers ({count})")
    window = _integer(raw, "sliding_window", file)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(raw: Json) -> CheckpointDType:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return cast(CheckpointDType, name) if name in ("bfloat16", "float16") else "float32"


def _end_tokens(raw: Json, folder: Path) -> tuple[int, ...]:
    stated = _read_json(folder / "generation_config.json", required=False).get("eos_token_id")
    stated = raw.get("eos_token_id") if stated is None else stated
    ids = stated if isinstance(stated, list) else [stated]
    return tuple(i for i in ids if isinstance(i, int))


def _integer(raw: Json, key: str, file: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(file, key, value, "a positive integer")
    return value


def _wrong(file: str, key: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(f"model: {file}: {key}={value!r} must be {wanted}.", param="model")
