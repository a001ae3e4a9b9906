"""Training blocks: anchor positions, labels, and weights of the slots.

Shapes: B sequences, T tokens, A anchors, S block size, N = S - 1 drafted slots, V vocabulary.
Slot 0 is the clean anchor at position a; slot k is a mask at a + k and predicts the token at its own position
(DFlash, arXiv:2602.06036).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blocks:
    """`inputs` [B, A, S] token ids; `labels` and `is_counted` [B, A, N]; `anchors` [B, A] positions."""

    anchors: torch.Tensor
    inputs: torch.Tensor
    labels: torch.Tensor
    is_counted: torch.Tensor

    @property
    def before(self) -> torch.Tensor:
        return torch.cat([self.inputs[..., :1], self.labels[..., :-1]], dim=-1)


def draw_anchors(
    first_B: torch.Tensor, length_B: torch.Tensor, num_anchors: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw anchors uniformly from positions first .. length - 2, so that each has a label; int64 [B, A]."""
    span_B = (length_B - 1 - first_B).clamp(min=1)
    uniform_BA = torch.rand(len(first_B), num_anchors, generator=generator).to(first_B.device)
    return first_B[:, None] + (uniform_BA * span_B[:, None]).long()


def cut_blocks(
    tokens_BT: torch.Tensor, length_B: torch.Tensor, anchors_BA: torch.Tensor, block_size: int, mask_id: int
) -> Blocks:
    positions_BAS = anchors_BA[..., None] + torch.arange(block_size, device=tokens_BT.device)
    inside_BAS = positions_BAS < length_B[:, None, None]
    clipped = positions_BAS.clamp(max=tokens_BT.shape[1] - 1).flatten(1)
    tokens_BAS = tokens_BT.gather(1, clipped).view_as(positions_BAS)
    inputs_BAS = tokens_BAS.clone()
    inputs_BAS[..., 1:] = mask_id
    return Blocks(anchors_BA, inputs_BAS, tokens_BAS[..., 1:], inside_BAS[..., 1:])


def dpace_weights(cross_entropy_BAN: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """Return the D-PACE weights (arXiv:2605.18810), detached, [B, A, N].

    w_j = sum over m >= j of prod over i <= m of q~_i, where q~ is the drafter's probability of the right
    token, smoothed by `alpha`. A slot thus weighs as much as the expected number of tokens accepted from it
    on.
    """
    softened = (1 - alpha) * torch.exp(-cross_entropy_BAN.detach()) + alpha
    reached = softened.cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1)


def weighted_mean(
    loss_BAN: torch.Tensor, weights: torch.Tensor, is_counted_BAN: torch.Tensor
) -> torch.Tensor:
    weights = weights * is_counted_BAN
    return (loss_BAN * weights).sum() / weights.sum()
