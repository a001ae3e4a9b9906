"""Device memory between the passes of a step and the connection to a drafter in another process.

    receive ─▶ drafts or trees, margins ─▶ drafter's pass ─▶ target's pass ─▶ choices, features ─▶ send

The passes use this memory and that of trees alone, so they can be captured in CUDA graphs. What waits for the
drafter, or sends to it, happens before and after them. With trees, choices and features are those of the
accepted paths. Used by `gpu_runner.py`.

Legend: N rows, X sampled rows, R requests, m taps, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....drafter.dflash.config import DrafterConfig
from .runner_interface import RemoteDrafter

if TYPE_CHECKING:  # its module needs Triton
    from .device_trees import StepTrees


class RemoteExchange:
    """Memory for steps of at most `max_rows` rows.

    Args:
        margins_N: fp32, where the target's pass reads margins by row of the blocks.
        config, dtype: of the drafter, and of its features.

    Attributes:
        drafts_N: int64, the received drafts by row of the blocks, if drafts form chains.
    """

    def __init__(
        self,
        remote: RemoteDrafter,
        margins_N: Tensor,
        max_rows: int,
        config: DrafterConfig,
        dtype: torch.dtype,
    ) -> None:
        self._remote, self._margins_N, self.config = remote, margins_N, config
        device = margins_N.device
        self.drafts_N = torch.zeros(len(margins_N), dtype=torch.int64, device=device)
        self._chosen_X = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._features_NH = torch.zeros(max_rows, config.hidden_size, dtype=dtype, device=device)

    def receive(self, num_rows: int, trees: StepTrees | None, *, has_grammars: bool) -> None:
        """Wait for the drafts of blocks of `num_rows` rows.

        Zeros without margins replace late ones, or trees without a node. With grammars, which restrict trees,
        trees come with their candidates.
        """
        margins_N, candidates = self._margins_N[:num_rows], list[tuple[Tensor, float]]()
        if trees is None:
            drafts = self.drafts_N[:num_rows]
        else:
            drafts = trees.trees.values_RE
            if has_grammars:
                assert trees.candidates is not None, "requests may have grammars"
                ids_NC, scores_NPC = trees.candidates
                candidates = [(ids_NC[:num_rows], 0), (scores_NPC[:num_rows], -torch.inf)]
        self._remote.receive([(drafts, 0), (margins_N, torch.nan), *candidates])

    def put(self, chosen_X: Tensor, taps_NmH: Tensor) -> None:
        """Keep the choices and features of the target's pass; a part of it."""
        self._chosen_X[: len(chosen_X)].copy_(chosen_X)
        features_NH = self._remote.features(taps_NmH)
        if features_NH is not None:
            self._features_NH[: len(features_NH)].copy_(features_NH)

    def send(self, num_drafts_R: Tensor, num_chosen: int, num_rows: int) -> None:
        """Send what `put` has kept, with the numbers of drafts among the rows."""
        self._remote.send(num_drafts_R, self._chosen_X[:num_chosen], self._features_NH[:num_rows])
