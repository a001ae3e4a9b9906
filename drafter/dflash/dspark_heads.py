"""DSpark's heads (arXiv 2607.05147): a bias by the token before, and the chance that a draft is accepted.

    z'_k(b) = z_k(b) + sum_r W1[x_(k-1)]_r W2[b]_r          Markov head; x_0 is the anchor
    c_k = sigmoid(w [y_k; W1[x_(k-1)]] + b)                  confidence head

The bias is a `Selector`'s pair score with all gates 1, so `step/sampling/selector.py` walks it. Its
authors add it to all logits; here the best candidates of a row get it, as vLLM's `dspark_draft_topk` does. No
output token depends on that. The confidence head is trained with the acceptance probability of verification
by rejection. Made by `model.py`.

Legend: X sampled rows, H hidden, V vocabulary, E rank, P columns, R requests, W drafts.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..drafter_weights import DrafterWeights
from ..step.inputs.proposals import Proposals
from ..step.inputs.row_layout import StepRows
from ..step.sampling.selector import SelectorCodebooks
from .config import MarkovSize
from .weights import Selector

_MAX_LOGIT = 15.0
MARKOV, CONFIDENCE = "markov_head", "confidence_head.proj"  # prefixes of tensor names


class OpenGates:
    """Gates of a selector that scores pairs of tokens alone."""

    __slots__ = ("_rank",)

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, hidden_XH: Tensor, residual_XE: Tensor | None = None, /) -> Tensor:
        assert residual_XE is None, "a selector's gates have no residual"
        return hidden_XH.new_ones(len(hidden_XH), self._rank)


def make_markov(
    weights: DrafterWeights, size: MarkovSize, vocab_size: int, target_ids_V: Tensor | None
) -> Selector:
    """Return the Markov head; `target_ids_V` maps the drafter's own vocabulary to the target's."""
    previous_VE, next_VE = (weights[f"{MARKOV}.{name}.weight"] for name in ("markov_w1", "markov_w2"))
    if target_ids_V is not None:
        next_VE = next_VE.new_zeros(vocab_size, size.rank).index_copy_(0, target_ids_V, next_VE)
    return Selector(
        OpenGates(size.rank), SelectorCodebooks(previous_VE.contiguous(), next_VE.contiguous(), size.top_k)
    )


class ConfidenceHead:
    """Sharpens margins by the predicted chance that a draft is accepted.

    A margin m becomes sqrt((1 + m) / (1 - c)) - 1: what the acceptance model reads, log(1 + margin), is the
    mean of log(1 + m) and -log(1 - c), which it calibrates like any margin.

    Args:
        weight_1F, bias_1: weights for [y; W1[x]], or for y alone.
        previous_VE: W1, if it is read.
    """

    __slots__ = ("_bias_1", "_of_hidden_H", "_of_token_V")

    def __init__(self, weight_1F: Tensor, bias_1: Tensor, previous_VE: Tensor | None) -> None:
        weight_F, self._bias_1 = weight_1F[0].float(), bias_1.float()
        hidden_size = len(weight_F) - (0 if previous_VE is None else previous_VE.shape[1])
        self._of_hidden_H = weight_F[:hidden_size].contiguous()
        self._of_token_V = None if previous_VE is None else previous_VE.float() @ weight_F[hidden_size:]

    def sharpen(self, margins_X: Tensor, hidden_XH: Tensor, before_X: Tensor) -> Tensor:
        """Return the margins [X], sharpened; `before_X` are the tokens chosen before these rows' drafts."""
        logits_X = hidden_XH.float() @ self._of_hidden_H + self._bias_1
        if self._of_token_V is not None:
            logits_X = logits_X + self._of_token_V[before_X]
        # 1 / (1 - c) = 1 + exp(logit); an infinite margin would mean that no other token is possible.
        return ((1.0 + margins_X) * (1.0 + logits_X.clamp(max=_MAX_LOGIT).exp())).sqrt() - 1.0

    def sharpened(self, proposals: Proposals, hidden_XH: Tensor, block: StepRows) -> Proposals:
        """Return the proposals of a block with sharpened margins."""
        margins_RW, is_draft_RW = proposals.margins_RK, proposals.drafts_RK >= 0
        assert margins_RW is not None, "a block's drafts have margins"
        before_X1 = block.previous(proposals.drafts_RK[is_draft_RW].unsqueeze(1))
        margins_X = self.sharpen(margins_RW[is_draft_RW], hidden_XH, before_X1.squeeze(1))
        return replace(proposals, margins_RK=margins_RW.masked_scatter(is_draft_RW, margins_X))
