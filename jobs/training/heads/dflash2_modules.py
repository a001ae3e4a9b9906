"""DFlash2's two additions as trainable modules: convolutions around sublayers, and the selector's scores.

Parameter names are z-lab's. Both are initialized to have no effect: identity kernels, and a zero codebook.
The inference code is `drafter/compute/eager/dynamic_convolution.py` and
`drafter/step/sampling/selector_walk.py`. Used by `dflash_module.py`.

Shapes: S block size, D width, C groups of neighboring channels, E rank, V vocabulary, R rows.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ....drafter.dflash.config import SelectorSize

SIDES, TAPS = 2, 2  # before and after a sublayer; a row and the one before it


class BlockConvolution(nn.Module):
    """Grouped dynamic convolution: y_t = sum over taps o of (base_o + delta_to) * v_(t-o).

    delta is computed per row and group of channels, base is a parameter per channel; v is 0 before the block.
    """

    def __init__(self, width: int, group_size: int) -> None:
        super().__init__()
        self._groups = width // group_size
        self.base_kernel = nn.Parameter(torch.zeros(SIDES, TAPS, width))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = nn.Linear(width, SIDES * TAPS * self._groups, bias=False)

    def kernels(self, u_xSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernels before and after the sublayer, [.., S, taps, D], from its normed input."""
        delta = self.kernel_projection(u_xSD).unflatten(-1, (SIDES, TAPS, self._groups, 1))
        base = self.base_kernel.to(delta.dtype).view(SIDES, TAPS, self._groups, -1)
        before, after = (base + delta).flatten(-2).unbind(-3)
        return before, after

    @staticmethod
    def convolve(v_xSD: torch.Tensor, kernels_xSTD: torch.Tensor) -> torch.Tensor:
        earlier_xSD = F.pad(v_xSD[..., :-1, :], (0, 0, 1, 0))
        return kernels_xSTD[..., 0, :] * v_xSD + kernels_xSTD[..., 1, :] * earlier_xSD


class TrainableSelector(nn.Module):
    """Score of token b after token a, given the hidden state y: sum_r A[a]_r (H y)_r G[b]_r."""

    def __init__(self, width: int, vocab_size: int, size: SelectorSize) -> None:
        super().__init__()
        self.size = size
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, size.rank) * 0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, size.rank))
        self.hidden_projection = nn.Linear(width, size.rank, bias=False)

    def scores(self, y_RD: torch.Tensor, before_R: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tokens after `before`, [R, V], to be added to the logits."""
        gated_RE = F.embedding(before_R, self.predecessor_codebook) * self.hidden_projection(y_RD)
        return F.linear(gated_RE, self.successor_codebook)
