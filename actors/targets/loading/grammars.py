"""What holds a rank's requests to their grammars, made from the checkpoint's tokenizer.

Every rank has it: all must see the same drafts. What reads text is imported where there is some to be read:
kernels are examined and timed on machines that have none of it. Called by `rank.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...checkpoints import has_tokenizer, tokenizer_folder
from ...machine import owned_cores
from .plan import LoadPlan

if TYPE_CHECKING:
    from ....drafter.grammars.states import GrammarStates

MAX_MASK_THREADS = 8


def make_grammars(plan: LoadPlan) -> GrammarStates | None:
    """None where no text could be held to anything: without a tokenizer, or an end token that it has."""
    config = plan.config
    folder = plan.target_folder if config.tokenizer is None else tokenizer_folder(config)
    if config.skip_tokenizer_init or not plan.target.eos_token_ids or not has_tokenizer(folder):
        return None
    from ....drafter.grammars.compiler import GrammarCompiler
    from ....drafter.grammars.states import GrammarStates
    from ...tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    if not (eos := tokenizer.known(plan.target.eos_token_ids)):
        return None
    compiler = GrammarCompiler(tokenizer.to_json(), plan.target.vocab_size, eos)
    return GrammarStates(compiler, max(1, min(MAX_MASK_THREADS, owned_cores() // 2)))
