"""DFlash2's selection of a block's drafts: rules, then candidates of each row, then a walk over them.

Rules and noise come before the candidates, because they decide which tokens can win
(`selector_candidates.py`). Filters come after the selector's scores, because these are the drafter's
distribution (`selector_walk.py`). Called by `dflash/proposer.py`; `gpu_triton/` has candidates and walk in
kernels.

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
    """Return drafts and margins [R, W]; a margin is between scores after the token chosen before.

    Args:
        logits_XV: any float dtype, of `block`'s mask rows; may be edited.
        gates_XE: h, of the same rows.
    """
    logits_XV = edit_logits(logits_XV, block.sampling, operators)
    found = operators.candidates(logits_XV, block.sampling, codebooks.top_k)
    return operators.walk(*found, gates_XE, block, codebooks)
