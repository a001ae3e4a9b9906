"""Compiles a rank's grammars with the checkpoint's tokenizer.

Every rank has them, as all ranks must see the same drafts. Tokenizer and compiler are imported only if
needed: kernels are tested and timed on machines that have neither. Called by `rank_loader.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...system.host_resources import owned_cores
from ...tokenization.checkpoint_paths import has_tokenizer, tokenizer_folder
from .load_plan import LoadPlan

if TYPE_CHECKING:
    from ....drafter.grammars.matchers import GrammarStates

MAX_MASK_THREADS = 8


def make_grammars(plan: LoadPlan) -> GrammarStates | None:
    """Return the grammars; None without a tokenizer, or if none of the target's end tokens is in it."""
    config = plan.config
    folder = plan.target_folder if config.tokenizer is None else tokenizer_folder(config)
    if config.skip_tokenizer_init or not plan.target.eos_token_ids or not has_tokenizer(folder):
        return None
    from ....drafter.grammars.compiler import GrammarCompiler
    from ....drafter.grammars.matchers import GrammarStates
    from ...tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    if not (eos := tokenizer.known(plan.target.eos_token_ids)):
        return None
    compiler = GrammarCompiler(tokenizer.to_json(), plan.target.vocab_size, eos)
    return GrammarStates(compiler, max(1, min(MAX_MASK_THREADS, owned_cores() // 2)))
