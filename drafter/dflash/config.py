"""Reading a drafter's config.json: z-lab's and Speculators' formats, made one.

Everything that can be told from the file alone is checked here, and `check_fits` compares with the target, so
that a drafter which cannot work is refused before a weight is read. Called by `checkpoint.py`, and by whoever
sizes memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...cluster.errors import CheckpointError
from ..compute.rope import RopeConfig
from .features import TargetFacts

Json = Mapping[str, Any]  # Any: JSON values


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """Attention of one layer: whether rows see only earlier rows of their block, and the window, if any."""

    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A drafter's shape and meaning, whatever format it came in.

    Attributes:
        file: where it was read, for messages.
        layout: "z-lab" or "speculators".
        target_layer_ids: tapped blocks, 0-based, in `fc`'s column order: id i is the output of block i.
        layers: attention of each layer.
        block_size: anchor and masks; proposals are one fewer.
        mask_token_id: token whose embedding stands for "to be filled in".
        vocab_size: of the target it was made for.
        draft_vocab_size: rows of its own head; equals `vocab_size` unless `d2t` maps them.
        target_hidden_size: of a tapped state; None if the file does not say.
        num_target_layers: of the target it was made for; None if the file does not say.
        mask_embedding: whether a file replaces the mask token's embedding row.
        input_embedding_scale, output_multiplier, logit_softcap: 1, 1, None where absent.
    """

    file: str
    layout: Literal["z-lab", "speculators"]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    target_layer_ids: tuple[int, ...]
    layers: tuple[DraftLayer, ...]
    block_size: int
    mask_token_id: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int | None
    num_target_layers: int | None
    mask_embedding: bool
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def max_drafts(self) -> int:
        return self.block_size - 1

    @property
    def maps_vocabulary(self) -> bool:
        """Whether its tokens must be mapped to the target's (`d2t`)."""
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def load(cls, path: str | Path) -> DrafterConfig:
        """Read `config.json` of a folder; CheckpointError says what is missing or not supported."""
        folder = Path(path)
        file = folder / "config.json"
        try:
            raw = json.loads(file.read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{file} does not exist: speculative_config.model must be a folder with a DFlash checkpoint.",
                param="speculative_config.model",
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read as JSON: {error}.") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{file} must hold a JSON object.")
        if "speculators_model_type" in raw:
            config = _read_speculators(_Fields(raw, str(file)))
        else:
            config = _read_z_lab(_Fields(raw, str(file)), (folder / "mask_embedding.pt").exists())
        config._check_alone()
        return config

    def _check_alone(self) -> None:
        """What the file itself must get right."""
        self._require(self.block_size >= 2, "block_size", self.block_size, "at least 2 (anchor and one mask)")
        self._require(self.num_layers >= 1, "num_hidden_layers", self.num_layers, "at least 1")
        self._require(bool(self.target_layer_ids), "target_layer_ids", [], "a non-empty list")
        heads, kv_heads = self.num_heads, self.num_kv_heads
        self._require(
            kv_heads >= 1 and heads % kv_heads == 0,
            "num_key_value_heads",
            kv_heads,
            f"a divisor of num_attention_heads ({heads})",
        )
        self._require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        self._require(
            self.draft_vocab_size <= self.vocab_size,
            "draft_vocab_size",
            self.draft_vocab_size,
            f"at most vocab_size ({self.vocab_size})",
        )

    def check_fits(self, target: TargetFacts) -> None:
        """Raise CheckpointError, naming field and remedy, if this drafter cannot draft for `target`."""
        remedy = "use a drafter that was trained for this target"
        made_for = self.target_hidden_size or self.hidden_size
        self._require(
            made_for == target.hidden_size,
            "hidden_size" if self.target_hidden_size is None else "target_hidden_size",
            made_for,
            f"the target's hidden_size {target.hidden_size}; {remedy}",
        )
        self._require(
            self.hidden_size == target.hidden_size,
            "hidden_size",
            self.hidden_size,
            f"the target's hidden_size {target.hidden_size}, whose embedding it shares; {remedy}",
        )
        self._require(
            self.num_target_layers in (None, target.num_layers),
            "num_target_layers",
            self.num_target_layers,
            f"the target's num_hidden_layers {target.num_layers}; {remedy}",
        )
        shift = 1 if self.layout == "speculators" else 0
        self._require(
            all(0 <= i < target.num_layers for i in self.target_layer_ids),
            "aux_hidden_state_layer_ids" if shift else "dflash_config.target_layer_ids",
            [i + shift for i in self.target_layer_ids],
            f"from {shift} to {target.num_layers - 1 + shift} for a target of {target.num_layers} layers;"
            f" {remedy}",
        )
        self._require(
            self.vocab_size == target.vocab_size,
            "vocab_size",
            self.vocab_size,
            f"the target's vocab_size {target.vocab_size}; {remedy}",
        )
        self._require(
            0 <= self.mask_token_id < target.vocab_size or self.mask_embedding,
            "mask_token_id",
            self.mask_token_id,
            f"below the target's vocab_size {target.vocab_size}; {remedy}",
        )

    def _require(self, ok: bool, field: str, value: object, wanted: str) -> None:
        if not ok:
            raise CheckpointError(f"{self.file}: {field}={value!r} must be {wanted}.", param=field)


class _Fields:
    """A JSON object that complains well: missing and mistyped values name file and key."""

    def __init__(self, raw: Json, file: str, prefix: str = "") -> None:
        self.raw, self.file, self._prefix = raw, file, prefix

    def child(self, key: str) -> _Fields:
        value = self.raw.get(key) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.file}: {self._prefix}{key} must be an object.", param=key)
        return _Fields(value, self.file, f"{self._prefix}{key}.")

    def get(self, key: str, default: Any = None) -> Any:  # Any: JSON values
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self.complain(key, value, "an integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.complain(key, value, "a number")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
            self.complain(key, value, "a list of integers")
        return tuple(value)

    def refuse(self, key: str, neutral: tuple[object, ...] = (None, False)) -> None:
        """A feature that changes the mathematics and that we do not have."""
        if self.raw.get(key) not in neutral:
            self.complain(key, self.raw[key], f"absent or {neutral[-1]!r}: not yet supported")

    def complain(self, key: str, value: object, wanted: str) -> None:
        name = f"{self._prefix}{key}"
        stated = "is missing; it" if value is None else f"= {value!r}"
        raise CheckpointError(f"{self.file}: {name} {stated} must be {wanted}.", param=name)


def _read_z_lab(top: _Fields, has_mask_embedding: bool) -> DrafterConfig:
    dflash = top.child("dflash_config")
    _refuse_successors(top, dflash)
    nested_first = dflash if dflash.get("block_size") is not None else top
    return DrafterConfig(
        **_backbone(top),
        layout="z-lab",
        layers=_z_lab_layers(top, dflash),
        target_layer_ids=dflash.integers("target_layer_ids"),
        block_size=nested_first.integer("block_size"),
        mask_token_id=dflash.integer("mask_token_id"),
        draft_vocab_size=top.integer("vocab_size"),
        target_hidden_size=None,
        num_target_layers=top.get("num_target_layers"),
        mask_embedding=has_mask_embedding,
        input_embedding_scale=dflash.number("input_embedding_scale", 1.0),
        output_multiplier=dflash.number("output_multiplier", 1.0),
        logit_softcap=dflash.number("final_logit_softcapping", 0.0) or None,
    )


def _refuse_successors(top: _Fields, dflash: _Fields) -> None:
    for name in top.get("architectures", []):
        if name != "DFlashDraftModel":
            raise CheckpointError(
                f"{top.file}: architecture {name!r} is not yet supported; supported is DFlashDraftModel.",
                param="architectures",
            )
    for key in ("attention_sink_bias", "conv_kernel_size", "conv_group_size", "selector_rank"):
        dflash.refuse(key)
    for key in dflash.raw:
        if key.startswith("lilicorr_"):
            dflash.refuse(key)
    dflash.refuse("selector_top_k")
    dflash.refuse("attention_value_scale", (None, 1, 1.0))


def _z_lab_layers(top: _Fields, dflash: _Fields) -> tuple[DraftLayer, ...]:
    """Causality: `is_causal`, else `dflash_config.causal`, else sliding layers only; not with `use_swa`."""
    stated = top.get("is_causal", dflash.get("causal"))
    if dflash.get("use_swa", False):
        window = dflash.integer("swa_window_size")
        return (DraftLayer(bool(stated), window),) * top.integer("num_hidden_layers")
    return tuple(
        DraftLayer(sliding if stated is None else bool(stated), window if sliding else None)
        for sliding, window in _layer_windows(top)
    )


def _layer_windows(fields: _Fields) -> list[tuple[bool, int | None]]:
    count = fields.integer("num_hidden_layers")
    types = fields.get("layer_types") or ["full_attention"] * count
    if len(types) != count:
        fields.complain("layer_types", types, f"one entry for each of num_hidden_layers ({count})")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            fields.complain("layer_types", types, "full_attention or sliding_attention in every entry")
    sliding = [kind == "sliding_attention" for kind in types]
    window = fields.integer("sliding_window") if any(sliding) else None
    return [(slides, window if slides else None) for slides in sliding]


def _read_speculators(top: _Fields) -> DrafterConfig:
    kind = top.get("speculators_model_type")
    if kind != "dflash":
        top.complain("speculators_model_type", kind, "'dflash': others are not yet supported")
    if top.get("sample_from_anchor", False):
        top.complain(
            "sample_from_anchor",
            True,
            "false: a drafter whose anchor slot predicts (DSpark) is not yet supported",
        )
    layer = top.child("transformer_layer_config")
    non_causal = bool(top.get("sliding_window_non_causal", False))
    layers = tuple(DraftLayer(slides and not non_causal, window) for slides, window in _layer_windows(layer))
    vocab_size = layer.integer("vocab_size")
    return DrafterConfig(
        **_backbone(layer),
        layout="speculators",
        layers=layers,
        # Captured *before* layer i: the output of block i - 1.
        target_layer_ids=tuple(i - 1 for i in top.integers("aux_hidden_state_layer_ids")),
        block_size=top.integer("block_size", 8),
        mask_token_id=top.integer("mask_token_id"),
        draft_vocab_size=top.integer("draft_vocab_size", vocab_size),
        target_hidden_size=top.get("target_hidden_size"),
        num_target_layers=None,
        mask_embedding=False,
    )


def _backbone(fields: _Fields) -> dict[str, Any]:  # Any: fields of DrafterConfig by name
    """The Qwen3 block: what both formats spell alike."""
    if fields.get("hidden_act", "silu") != "silu":
        fields.complain("hidden_act", fields.get("hidden_act"), "'silu'")
    fields.refuse("attention_bias")
    fields.refuse("mlp_bias")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
    return {
        "file": fields.file,
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": RopeConfig.read(fields.raw, head_dim, fields.file),
        "vocab_size": fields.integer("vocab_size"),
    }
