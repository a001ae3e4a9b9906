"""Reads a DFlash drafter's config.json in z-lab's, DeepSpec's, Speculators' or transformers' format.

The models in `config_formats.py` check what the file alone determines; `check_fits` compares it with the
target. A drafter that cannot work is refused before a weight is read. Called by `checkpoint.py` and by memory
planning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...cluster.errors import CheckpointError
from ..compute.backend import Feature, ModelStackSpec
from ..compute.checkpoint.hf_config import Json, parse, wrong
from ..compute.layers.rope import RopeConfig
from ..drafter_spec import DrafterShape, DraftLayer, read_drafter
from .config_formats import (
    Assistant,
    DeepSpec,
    DeepSpecGemma4,
    DFlashKind,
    DFlashSpeculators,
    DFlashSpeculatorsKind,
    ZLab,
)
from .config_parts import BLOCK_SIZE, Backbone, Conditioning, DSparkHeads, Scales
from .drafter_classes import ASSISTANT, DEEPSPEC, DEEPSPEC_GEMMA4
from .target_features import TargetFacts


@dataclass(frozen=True, slots=True)
class ConvolutionSize:
    """DFlash2's convolutions: taps, and the number of adjacent channels that share a dynamic kernel."""

    num_taps: int
    group_size: int


@dataclass(frozen=True, slots=True)
class SelectorSize:
    """DFlash2's selector: rank of the codebooks, and candidates per row."""

    rank: int
    top_k: int


# Candidates of a row for DSpark's Markov head, which its authors apply to the whole vocabulary.
MARKOV_CANDIDATES = 64
_PLAIN_CANDIDATES = 16  # of a row of a draft tree, without a selector or Markov head


@dataclass(frozen=True, slots=True)
class MarkovSize:
    """DSpark's Markov head: rank of the bias, and candidates per row that get it."""

    rank: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig(DrafterShape):
    """A DFlash drafter's shape and options, independent of the checkpoint format.

    Attributes:
        layout: "z-lab", "deepspec", "speculators" or "assistant" (transformers' own).
        block_size: rows of a block: the anchor and `block_size` - 1 masks.
        samples_anchor: whether each row predicts the token after its position, the anchor's row too; else
            each mask predicts the token at its own.
        target_hidden_size, num_target_layers: of the target it was trained for; None if the file does not
            say.
        mask_embedding: whether `mask_embedding.pt` replaces the mask token's embedding row.
        input_embedding_scale: factor on input embeddings; None: use the target's.
        output_multiplier, logit_softcap: logits are c * tanh(multiplier * z / c); None: no cap.
        attention_sinks: whether every head has a learned sink logit.
        attention_value_scale: factor on v.
        convolutions, selector: DFlash2's parts; None if absent.
        markov: DSpark's Markov head; None if absent.
        confidence_head: what DSpark's confidence head reads; None if absent.
    """

    layout: Literal["z-lab", "deepspec", "speculators", "assistant"]
    block_size: int
    mask_token_id: int
    target_hidden_size: int | None
    num_target_layers: int | None
    mask_embedding: bool
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    attention_sinks: bool = False
    attention_value_scale: float = 1.0
    convolutions: ConvolutionSize | None = None
    selector: SelectorSize | None = None
    samples_anchor: bool = False
    markov: MarkovSize | None = None
    confidence_head: Literal["hidden", "hidden and token before"] | None = None

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.samples_anchor else self.block_size - 1

    @property
    def num_candidates(self) -> tuple[int, int]:
        """The candidates of a row of a draft tree: P, C of `BlockCandidates` (`step/inputs/proposals.py`)."""
        if (scored := self.selector or self.markov) is None:
            return 1, min(_PLAIN_CANDIDATES, self.vocab_size)
        return scored.top_k, scored.top_k

    @property
    def anchor_distance(self) -> int:
        """Rows from a block's anchor to its first row that samples a draft."""
        return 0 if self.samples_anchor else 1

    @classmethod
    def load(cls, path: str | Path, overrides: Json | None = None) -> DrafterConfig:
        """Read a folder's `config.json` with `overrides`; CheckpointError names what is not supported."""
        mask_embedding = (Path(path) / "mask_embedding.pt").exists()

        def read(raw: Json, file: str) -> DrafterConfig:
            if "speculators_model_type" in raw:
                return _read_speculators(raw, file)
            # Checked first: other kinds of drafters have other keys.
            kind = parse(DFlashKind, raw, file).name
            if kind == DEEPSPEC_GEMMA4:
                return _read_deepspec_gemma4(raw, file)
            if kind == DEEPSPEC and "dflash_config" not in raw:
                return _read_deepspec(parse(DeepSpec, raw, file), raw, file)
            of_kind = _read_assistant if kind == ASSISTANT else _read_z_lab
            return of_kind(raw, file, mask_embedding=mask_embedding)

        return read_drafter(path, overrides, read)

    @property
    def key_of_taps(self) -> str:
        keys = {"speculators": "aux_hidden_state_layer_ids", "z-lab": "dflash_config.target_layer_ids"}
        return keys.get(self.layout, "target_layer_ids")

    def stack_spec(self) -> ModelStackSpec:
        """Return what a backend must support to compute this model's layers."""
        features: set[Feature] = set()
        if self.attention_sinks:
            features.add("attention sinks")
        if self.convolutions is not None:
            features.add("convolutions around attention and MLP")
        if self.gemma4:
            features |= {"norms after attention and MLP", "scaled residuals", "normed values", "GELU"}
            features.add("norm weights in fp32")
        return ModelStackSpec(
            name="drafter",
            sizes=frozenset({self.hidden_size, self.intermediate_size}),
            head_dims=frozenset({self.head_dim}),
            features=frozenset(features),
        )

    def check_fits(self, target: TargetFacts) -> None:
        for misfit in self.incompatibilities(target):
            raise misfit

    def incompatibilities(self, target: TargetFacts) -> Iterator[CheckpointError]:
        """Yield an error, with field and remedy, for each reason that it cannot draft for `target`."""
        remedy = "use a drafter that was trained for this target"
        made_for = self.target_hidden_size or self.hidden_size
        yield from self._unless(
            made_for == target.hidden_size,
            "hidden_size" if self.target_hidden_size is None else "target_hidden_size",
            made_for,
            f"the target's hidden_size {target.hidden_size}; {remedy}",
        )
        yield from self._unless(
            self.hidden_size == target.hidden_size,
            "hidden_size",
            self.hidden_size,
            f"the target's hidden_size {target.hidden_size}, whose embedding it shares; {remedy}",
        )
        yield from self._unless(
            self.num_target_layers in (None, target.num_layers),
            "num_target_layers",
            self.num_target_layers,
            f"the target's num_hidden_layers {target.num_layers}; {remedy}",
        )
        shift = 1 if self.layout == "speculators" else 0
        yield from self._unless(
            all(0 <= i < target.num_layers for i in self.target_layer_ids),
            self.key_of_taps,
            [i + shift for i in self.target_layer_ids],
            f"from {shift} to {target.num_layers - 1 + shift} for a target of {target.num_layers} layers;"
            f" {remedy}",
        )
        yield from self._unless(
            self.vocab_size == target.vocab_size,
            "vocab_size",
            self.vocab_size,
            f"the target's vocab_size {target.vocab_size}; {remedy}",
        )
        yield from self._unless(
            0 <= self.mask_token_id < target.vocab_size or self.mask_embedding,
            "mask_token_id",
            self.mask_token_id,
            f"below the target's vocab_size {target.vocab_size}; {remedy}",
        )

    def _unless(self, ok: bool, field: str, value: object, wanted: str) -> Iterator[CheckpointError]:
        if not ok:
            yield wrong(self.file, field, value, wanted)


def _read_z_lab(raw: Json, file: str, *, mask_embedding: bool) -> DrafterConfig:
    top = parse(ZLab, raw, file)
    dflash = top.dflash_config
    block_size = dflash.block_size or top.block_size
    if block_size is None:
        raise wrong(file, "block_size", None, BLOCK_SIZE)
    return DrafterConfig(
        **backbone_shape(top, raw, file),
        **_dflash2_parts(dflash),
        **_dspark_parts(top.heads, top.draft_vocab_size or top.vocab_size),
        **_scales(dflash),
        layout="z-lab",
        samples_anchor=top.samples_anchor,
        layers=_z_lab_layers(top),
        target_layer_ids=dflash.target_layer_ids,
        block_size=block_size,
        mask_token_id=dflash.mask_token_id,
        draft_vocab_size=top.draft_vocab_size or top.vocab_size,
        target_hidden_size=None,
        num_target_layers=top.num_target_layers,
        mask_embedding=mask_embedding,
    )


def _z_lab_layers(top: ZLab) -> tuple[DraftLayer, ...]:
    """Return each layer's mask: by `is_causal`, `dflash_config.causal` (JetSpec: `causal_head`), or causal in
    sliding layers only.
    """
    dflash = top.dflash_config
    stated = dflash.is_causal if top.is_causal is None else top.is_causal
    if dflash.use_swa:
        return (DraftLayer(bool(stated), dflash.swa_window_size),) * top.num_hidden_layers
    return tuple(
        DraftLayer(window is not None if stated is None else stated, window) for window in top.windows()
    )


def _read_deepspec_gemma4(raw: Json, file: str) -> DrafterConfig:
    top = parse(DeepSpecGemma4, raw, file)
    return replace(
        _read_deepspec(top, raw, file, rope_of="full_attention"),
        gemma4=True,
        k_is_v=top.attention_k_eq_v,
        logit_softcap=top.final_logit_softcapping or None,
        input_embedding_scale=None,  # the target's: both are scaled by the root of the same size
    )


def _read_deepspec(top: DeepSpec, raw: Json, file: str, rope_of: str | None = None) -> DrafterConfig:
    return DrafterConfig(
        **backbone_shape(top, raw, file, rope_of),
        **_dspark_parts(top, top.draft_vocab_size or top.vocab_size),
        layout="deepspec",
        layers=tuple(DraftLayer(False, window) for window in top.windows()),
        target_layer_ids=top.target_layer_ids,
        block_size=top.block_size,
        samples_anchor=True,
        mask_token_id=top.mask_token_id,
        draft_vocab_size=top.draft_vocab_size or top.vocab_size,
        target_hidden_size=None,
        num_target_layers=top.num_target_layers,
        mask_embedding=False,
        input_embedding_scale=1.0,
    )


def _read_assistant(raw: Json, file: str, *, mask_embedding: bool) -> DrafterConfig:
    top = parse(Assistant, raw, file)
    return DrafterConfig(
        **backbone_shape(top, raw, file),
        **_scales(top),
        layout="assistant",
        layers=tuple(DraftLayer(False, window) for window in top.windows()),
        target_layer_ids=top.target_layer_ids,
        block_size=top.block_size,
        mask_token_id=top.mask_token_id,
        draft_vocab_size=top.vocab_size,
        target_hidden_size=None,
        num_target_layers=None,
        mask_embedding=mask_embedding,
    )


def _read_speculators(raw: Json, file: str) -> DrafterConfig:
    parse(DFlashSpeculatorsKind, raw, file)  # checked first: other kinds of drafters have other keys
    top = parse(DFlashSpeculators, raw, file)
    backbone = top.transformer_layer_config
    causal = not top.sliding_window_non_causal
    return DrafterConfig(
        **backbone_shape(backbone, raw["transformer_layer_config"], file),
        **_dflash2_parts(top),
        **_dspark_parts(top, top.draft_vocab_size or backbone.vocab_size),
        **_scales(top, input_scale=1.0),  # vLLM, which runs this format, uses unscaled embeddings
        layout="speculators",
        layers=tuple(DraftLayer(causal and window is not None, window) for window in backbone.windows()),
        # Ids name blocks whose *input* is captured: the output of block i - 1.
        target_layer_ids=tuple(i - 1 for i in top.aux_hidden_state_layer_ids),
        block_size=top.block_size,
        samples_anchor=bool(top.sample_from_anchor),
        mask_token_id=top.mask_token_id,
        draft_vocab_size=top.draft_vocab_size or backbone.vocab_size,
        target_hidden_size=top.target_hidden_size,
        num_target_layers=None,
        mask_embedding=False,
    )


def backbone_shape(
    backbone: Backbone, raw: Json, file: str, rope_of: str | None = None
) -> dict[str, Any]:  # Any: fields of DrafterShape by name
    """Return what a backbone says; `raw` holds the keys of its rotation, of layers of type `rope_of`."""
    rope = RopeConfig.read(raw, backbone.dim, file, layer_type=rope_of)
    return {
        "file": file,
        "hidden_size": backbone.hidden_size,
        "intermediate_size": backbone.intermediate_size,
        "num_heads": backbone.num_attention_heads,
        "num_kv_heads": backbone.kv_heads,
        "head_dim": backbone.dim,
        "rms_norm_eps": backbone.rms_norm_eps,
        "rope": replace(rope, interleaved=not backbone.is_neox_style),
        "vocab_size": backbone.vocab_size,
        "attention_bias": backbone.attention_bias,
    }


def _scales(
    keys: Scales, input_scale: float | None = None
) -> dict[str, Any]:  # Any: fields of DrafterConfig by name
    """Return scales, soft cap and attention sinks; `input_scale` is used if the file has none."""
    stated = keys.input_embedding_scale
    return {
        "attention_sinks": keys.attention_sink_bias,
        "attention_value_scale": keys.attention_value_scale,
        "input_embedding_scale": input_scale if stated is None else stated,
        "output_multiplier": keys.output_multiplier,
        "logit_softcap": keys.final_logit_softcapping or None,
    }


def _dflash2_parts(keys: Conditioning) -> dict[str, Any]:  # Any: fields of DrafterConfig by name
    taps, group = keys.conv_kernel_size, keys.conv_group_size
    rank, top_k = keys.selector_rank, keys.selector_top_k
    return {
        "convolutions": None if taps is None or group is None else ConvolutionSize(taps, group),
        "selector": None if rank is None or top_k is None else SelectorSize(rank, top_k),
    }


def _dspark_parts(
    keys: DSparkHeads, draft_vocab_size: int
) -> dict[str, Any]:  # Any: fields of DrafterConfig by name
    rank, confidence = keys.markov_rank, None
    if keys.has_confidence_head:
        confidence = "hidden and token before" if keys.confidence_head_with_markov else "hidden"
    markov = MarkovSize(rank, min(MARKOV_CANDIDATES, draft_vocab_size)) if rank else None
    return {"markov": markov, "confidence_head": confidence}
