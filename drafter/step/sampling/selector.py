"""DFlash2's choice of a block's drafts: rules, then candidates of each row, then a walk over them.

Rules come before the candidates are taken, for they may forbid some; so does the noise, for it says which
tokens can win (`selector_candidates.py`). Filters come behind the scores, for these are what the drafter
believes (`selector_walk.py`). Called by `dflash/proposer.py`; `gpu_triton/` has candidates and paths in
kernels. What a selector scores is `dflash/model.py`'s.

Legend: V vocabulary, E rank, X mask rows.
"""

from __future__ import annotations

from torch import Tensor

from ..inputs.proposals import Proposals
from ..inputs.row_layout import StepRows
from .sampler import edit_logits
from .selector_walk import SelectorCodebooks
from .step_ops import DEFINITION, StepOperators


def select_paths(
    logits_XV: Tensor,
    gates_XE: Tensor,
    block: StepRows,
    codebooks: SelectorCodebooks,
    operators: StepOperators = DEFINITION,
) -> Proposals:
    """Drafts [R, W]; a margin is that of the scores behind who was chosen before.

    Args:
        logits_XV: any float dtype, of `block`'s mask rows; may be edited.
        gates_XE: h, of the same rows.
    """
    logits_XV = edit_logits(logits_XV, block.sampling, operators)
    found = operators.candidates(logits_XV, block.sampling, codebooks.top_k)
    return operators.walk(*found, gates_XE, block, codebooks)
