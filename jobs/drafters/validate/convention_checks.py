"""Checks of files that load but are likely wrong: tokenizer, layer ids, rotary embedding, dtypes, mask token.

Such a drafter gives few accepted drafts and no error. Most drafters have no tokenizer; if there is one, it
must be the target's. Called by `validate_pair.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....actors.checkpoints.checkpoint_paths import has_tokenizer
from ....actors.targets.model.model_spec import ModelSpec
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.errors import CheckpointError
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.target_features import usual_layer_ids
from ..common.drafter_files import AnyConfig, DrafterFiles, is_dflash


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """An error or a warning; `fatal`: the engine refuses the pair, or its drafts are useless."""

    what: str
    message: str
    fatal: bool

    def as_json(self) -> dict[str, Any]:  # Any: JSON values
        return dataclasses.asdict(self)


def fatal(what: str, message: str) -> Incompatibility:
    return Incompatibility(what, message, fatal=True)


def warning(what: str, message: str) -> Incompatibility:
    return Incompatibility(what, message, fatal=False)


def check_text(
    files: DrafterFiles[AnyConfig], spec: ModelSpec, target_folder: Path
) -> Iterator[Incompatibility]:
    if not has_tokenizer(target_folder):  # the pair runs with token ids
        return
    try:
        theirs = Tokenizer.load(target_folder)
        ours = Tokenizer.load(files.folder) if has_tokenizer(files.folder) else None
    except CheckpointError as error:
        yield fatal("tokenizer", error.message)
        return
    if theirs.vocab_size > spec.vocab_size:
        yield fatal(
            "tokenizer",
            f"the target's tokenizer has {theirs.vocab_size} tokens, its embedding {spec.vocab_size} rows: "
            "use both from one revision.",
        )
    if ours is not None:
        yield from _other_text(ours, theirs)
    if is_dflash(files) and not files.config.mask_embedding:
        yield from _mask_in_use(files.config.mask_token_id, theirs)


def _other_text(ours: Tokenizer, theirs: Tokenizer) -> Iterator[Incompatibility]:
    if _meaning(ours) != _meaning(theirs):
        yield fatal(
            "tokenizer",
            "the drafter's tokenizer differs from the target's, so ids mean other texts. Use the drafter of "
            "this target; if only the file is stale, delete it: the target's is used.",
        )
    templates = [None if each.template is None else each.template.source for each in (ours, theirs)]
    if None not in templates and templates[0] != templates[1]:
        yield warning(
            "chat template",
            "the drafter's chat template differs from the target's, which is used. If it was trained on "
            "chats of its own format (thinking on or off, perhaps), expect fewer accepted drafts in chats.",
        )


def _meaning(tokenizer: Tokenizer) -> object:
    """Return the parts of a tokenizer that map ids to text, without padding and truncation."""
    parts = json.loads(tokenizer.to_json())
    return parts["model"], parts["added_tokens"], parts["normalizer"], parts["pre_tokenizer"]


def _mask_in_use(mask: int, tokenizer: Tokenizer) -> Iterator[Incompatibility]:
    """Check that the mask token has no other use: it is beyond the tokenizer, or special and in no chat."""
    (spelled,) = tokenizer.tokens([mask])
    if spelled is None:
        return
    if spelled not in tokenizer.special_token_ids:
        yield warning(
            "mask token in use",
            f"mask_token_id={mask} is {spelled!r}, a token of ordinary text, and its embedding has that "
            "meaning. Use the id from the drafter's training; mostly it is special, or beyond the tokenizer.",
        )
    elif tokenizer.template is not None and spelled in tokenizer.template.source:
        yield warning(
            "mask token in use",
            f"mask_token_id={mask} is {spelled!r}, which the chat template writes into every conversation. "
            "Use the id from the drafter's training.",
        )


def check_conventions(files: DrafterFiles[DrafterConfig], spec: ModelSpec) -> Iterator[Incompatibility]:
    for check in _CHECKS:
        message = check(files, spec)
        if message:
            yield warning(_CHECKS[check], message)


def _shifted_ids(files: DrafterFiles[DrafterConfig], spec: ModelSpec) -> str:
    """Check for layer ids that follow the other format's convention: all differ from the usual ones by one.

    z-lab's ids name the layer with the tapped output; Speculators' ids name the layer after it and are larger
    by one. Ids beyond the target's layers are reported by `DrafterConfig.incompatibilities`.
    """
    config = files.config
    usual, ids = usual_layer_ids(spec.num_layers, config.num_taps), config.target_layer_ids
    if ids == usual or len(ids) < 2 or len(ids) != len(usual):  # a target of few layers has fewer usual taps
        return ""
    moved = {ids[i] - usual[i] for i in range(len(ids))}
    if moved == {1} and config.layout != "speculators":
        return (
            f"{config.key_of_taps}={list(ids)} are the usual ones plus one, as Speculators counts. "
            f"In this format write {list(usual)}, unless it was trained otherwise."
        )
    if moved == {-1} and config.layout == "speculators":
        return (
            f"aux_hidden_state_layer_ids={[i + 1 for i in ids]} are z-lab's usual ones. In this format "
            f"each is one higher: write {[i + 1 for i in usual]}, unless it was trained otherwise."
        )
    return ""


def _order_of_ids(files: DrafterFiles[DrafterConfig], spec: ModelSpec) -> str:
    ids = files.config.target_layer_ids
    if len(set(ids)) < len(ids):
        return f"{list(ids)} contains a layer twice, but each column block of `fc` belongs to one layer."
    if list(ids) != sorted(ids):
        return f"{list(ids)} is not ascending: right only if `fc` was trained with columns in this order."
    return ""


def _rotation(files: DrafterFiles[DrafterConfig], spec: ModelSpec) -> str:
    """Compare with the rotary embedding of the target's full attention, which published drafters use."""
    ours = files.config.rope
    theirs = [mixer.rope for mixer in spec.attentions if mixer.rope is not None]
    if not theirs or any((r.theta, r.kind) == (ours.theta, ours.kind) for r in theirs):
        return ""
    thetas = ", ".join(sorted({f"{r.kind} with theta {r.theta:g}" for r in theirs}))
    return (
        f"its rotary embedding is {ours.kind} with theta {ours.theta:g}, the target's {thetas}. If it was "
        "trained with the target's, set rope_theta and rope_scaling (rope_parameters) to the target's values."
    )


def _length(files: DrafterFiles[DrafterConfig], spec: ModelSpec) -> str:
    known = files.config.rope.scaling.get("max_position_embeddings")
    if not isinstance(known, int) or known >= spec.max_position_embeddings:
        return ""
    return (
        f"the drafter allows {known} positions, the target {spec.max_position_embeddings}: the engine serves "
        "no more than the drafter's. Raise the value if it was trained for more, else decode plainly."
    )


def _dtype(files: DrafterFiles[DrafterConfig], spec: ModelSpec) -> str:
    tensors = files.tensors  # of which shapes has no scales of quantized matrices
    floats = {tensors.dtypes[name] for name in tensors.shapes}.intersection(_FLOATS)
    floats -= {"F32"}  # rounding it loses nothing that matters; GGUF has every norm in it
    if floats <= {_NAMES[spec.dtype]}:
        return ""
    return (
        f"its weights are {', '.join(sorted(floats))}, the target's {_NAMES[spec.dtype]}, and both run in "
        "the target's dtype. Convert it from the dtype in which it was trained."
    )


def _verifier(files: DrafterFiles[DrafterConfig], spec: ModelSpec) -> str:
    named = files.verifier.get("architectures")
    if not isinstance(named, list) or not named or spec.architecture in named:
        return ""
    return (
        f"its files say that it was trained for {', '.join(map(str, named))}; the target is "
        f"{spec.architecture}. Use the drafter of this target."
    )


def _mask_is_taken(files: DrafterFiles[DrafterConfig], spec: ModelSpec) -> str:
    config: DrafterConfig = files.config
    if config.mask_token_id in spec.eos_token_ids and not config.mask_embedding:
        return (
            f"mask_token_id={config.mask_token_id} is an end-of-sequence token of the target, whose "
            "embedding has that meaning. Use a token that does not occur in text."
        )
    return ""


_FLOATS = ("BF16", "F16", "F32", "F64")
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Check -> name of the field in its report.
_CHECKS: dict[Callable[[DrafterFiles[DrafterConfig], ModelSpec], str], str] = {
    _shifted_ids: "layer ids",
    _order_of_ids: "layer ids",
    _rotation: "rope",
    _length: "max_position_embeddings",
    _dtype: "dtype",
    _verifier: "verifier",
    _mask_is_taken: "mask_token_id",
}
