"""Reads an EAGLE-3 drafter's config.json in SGLang's or Speculators' format.

The models in `config_formats.py` check what the file alone determines; `check_fits` compares it with the
target. A drafter that cannot work is refused before a weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..compute.backend import ModelStackSpec
from ..compute.checkpoint.hf_config import Json, parse, wrong
from ..dflash.config import backbone_shape
from ..dflash.target_features import TargetFacts
from ..drafter_spec import DrafterShape, DraftLayer, read_drafter
from .config_formats import (
    LAYER_IDS,
    Eagle3Kind,
    Eagle3Speculators,
    Eagle3SpeculatorsKind,
    Norms,
    OneLayer,
    SGLang,
)

DEFAULT_DRAFTS = 5  # passes per step: few published drafters are trained for more


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DrafterShape):
    """A one-layer EAGLE-3 drafter's shape and options, independent of the checkpoint format.

    Attributes:
        layout: "sglang" or "speculators".
        target_hidden_size: size of a tapped state.
        head_norms: whether queries and keys are normed per head, as in Qwen3.
        norm_before_residual: whether the residual starts from the normed feature rather than the feature.
        norm_before_fc: whether the concatenated taps are normed before `fc`.
    """

    layout: Literal["sglang", "speculators"]
    target_hidden_size: int
    head_norms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    @classmethod
    def load(
        cls, path: str | Path, num_target_layers: int | None, overrides: Json | None = None
    ) -> Eagle3Config:
        """Read a folder's `config.json` with `overrides`; CheckpointError names what is not supported.

        `num_target_layers` gives the default taps if the file names none; if it is None, `target_layer_ids`
        may be empty.
        """

        def read(raw: Json, file: str) -> Eagle3Config:
            of_format = _read_speculators if "speculators_model_type" in raw else _read_sglang
            return of_format(raw, file, num_target_layers)

        return read_drafter(path, overrides, read)

    def stack_spec(self) -> ModelStackSpec:
        """Return what a backend must support to compute this model's layers."""
        return ModelStackSpec(
            name="drafter",
            sizes=frozenset({self.hidden_size, self.intermediate_size}),
            head_dims=frozenset({self.head_dim}),
            features=frozenset({"keys from the second position on"}),
        )

    def check_fits(self, target: TargetFacts) -> None:
        remedy = "use a drafter that was trained for this target"
        if self.target_hidden_size != target.hidden_size:
            wanted = f"the target's hidden_size {target.hidden_size}; {remedy}"
            raise wrong(self.file, "target_hidden_size", self.target_hidden_size, wanted)
        if not all(0 <= i < target.num_layers for i in self.target_layer_ids):
            wanted = f"outputs of blocks of a target that has {target.num_layers} of them; {remedy}"
            raise wrong(self.file, LAYER_IDS, list(self.target_layer_ids), wanted)
        if self.vocab_size != target.vocab_size:
            wanted = f"the target's vocab_size {target.vocab_size}; {remedy}"
            raise wrong(self.file, "vocab_size", self.vocab_size, wanted)


def _read_sglang(raw: Json, file: str, num_target_layers: int | None) -> Eagle3Config:
    parse(Eagle3Kind, raw, file)  # checked first: other kinds of drafters have other keys
    top = parse(SGLang, raw, file)
    # SGLang's nested ids name blocks whose output is tapped; vLLM's top-level ids the blocks after those.
    inside = top.eagle_config.eagle_aux_hidden_state_layer_ids
    return Eagle3Config(
        **_shape(top, top, raw, file),
        layout="sglang",
        target_layer_ids=inside or _previous_layers(top.eagle_aux_hidden_state_layer_ids, num_target_layers),
        draft_vocab_size=top.draft_vocab_size or top.vocab_size,
    )


def _read_speculators(raw: Json, file: str, num_target_layers: int | None) -> Eagle3Config:
    parse(Eagle3SpeculatorsKind, raw, file)
    top = parse(Eagle3Speculators, raw, file)
    return Eagle3Config(
        **_shape(top.transformer_layer_config, top, raw["transformer_layer_config"], file),
        layout="speculators",
        target_layer_ids=_previous_layers(top.eagle_aux_hidden_state_layer_ids, num_target_layers),
        draft_vocab_size=top.draft_vocab_size,
    )


def _previous_layers(ids: tuple[int, ...], num_target_layers: int | None) -> tuple[int, ...]:
    """Return the blocks that feed these blocks; default: a low, a middle and a high one."""
    if not ids and num_target_layers is not None:
        ids = (2, num_target_layers // 2, num_target_layers - 3)
    return tuple(i - 1 for i in ids)


def _shape(
    block: OneLayer, norms: Norms, raw: Json, file: str
) -> dict[str, Any]:  # Any: fields of Eagle3Config by name
    return {
        **backbone_shape(block, raw, file),
        "layers": tuple(DraftLayer(True, window) for window in block.windows()),
        "target_hidden_size": norms.target_hidden_size or block.hidden_size,
        "head_norms": block.head_norms,
        "norm_before_residual": norms.norm_before_residual,
        "norm_before_fc": norms.norm_before_fc,
    }
