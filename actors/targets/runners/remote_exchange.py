"""Device memory between the passes of a step and the connection to a drafter in another process.

    receive ─▶ drafts, margins ─▶ drafter's pass ─▶ target's pass ─▶ choices, features ─▶ send

The passes use this memory alone, so they can be captured in CUDA graphs. What waits for the drafter, or sends
to it, happens before and after them. Used by `gpu_runner.py`.

Legend: N rows, X sampled rows, R requests, m taps, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .runner_interface import RemoteDrafter


class RemoteExchange:
    """Memory for steps of at most `max_rows` rows.

    Args:
        margins_N: fp32, where the target's pass reads margins by row of the blocks.
        hidden_size, dtype: of the drafter's features.

    Attributes:
        drafts_N: int64, the received drafts by row of the blocks.
    """

    def __init__(
        self, remote: RemoteDrafter, margins_N: Tensor, max_rows: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._remote, self._margins_N = remote, margins_N
        device = margins_N.device
        self.drafts_N = torch.zeros(len(margins_N), dtype=torch.int64, device=device)
        self._chosen_X = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._features_NH = torch.zeros(max_rows, hidden_size, dtype=dtype, device=device)

    def receive(self, num_rows: int) -> None:
        """Wait for the drafts of blocks of `num_rows` rows; zeros without margins replace late ones."""
        self._remote.receive(self.drafts_N[:num_rows], self._margins_N[:num_rows])

    def put(self, chosen_X: Tensor, taps_NmH: Tensor) -> None:
        """Keep the choices and features of the target's pass; a part of it."""
        self._chosen_X[: len(chosen_X)].copy_(chosen_X)
        features_NH = self._remote.features(taps_NmH)
        if features_NH is not None:
            self._features_NH[: len(features_NH)].copy_(features_NH)

    def send(self, num_drafts_R: Tensor, num_chosen: int, num_rows: int) -> None:
        """Send what `put` has kept, with the numbers of verified drafts."""
        self._remote.send(num_drafts_R, self._chosen_X[:num_chosen], self._features_NH[:num_rows])
