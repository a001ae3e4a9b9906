"""Checks that tokens mean the same to a drafter and its target: tokenizer, chat template, mask token.

Most drafters have no tokenizer; if there is one, it must be the target's. Called by `validate_pair.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ....actors.targets.model.model_spec import ModelSpec
from ....actors.tokenization.checkpoint_paths import has_tokenizer
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.errors import CheckpointError
from ..common.drafter_files import AnyConfig, DrafterFiles, is_dflash
from .incompatibility import Incompatibility, fatal, warning


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
