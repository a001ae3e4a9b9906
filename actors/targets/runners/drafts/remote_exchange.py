"""Device memory between the passes of a step and the connection to a drafter in another process.

    receive ─▶ drafts or trees, margins ─▶ drafter's pass ─▶ target's pass ─▶ choices, features ─▶ send

The passes use this memory and that of trees alone, so they can be captured in CUDA graphs. What waits for the
drafter, or sends to it, happens before and after them. With trees, choices and features are those of the
accepted paths. Used by `gpu_runner.py`.

Legend: N rows, X sampled rows, R requests, m taps, H hidden.
"""

from __future__ import annotations

import torch

from .....drafter.dflash.config import DrafterConfig
from .....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests, lay_out_block, write_drafts
from .....drafter.step.gpu_triton.tree_rows import path_rows
from .device_trees import StepTrees
from .draft_source import DeviceDrafts, DraftBuffer, RemoteDrafter, StepMemory, VerifiedRows


class RemoteExchange(DeviceDrafts):
    """Memory for steps of at most `max_rows` rows.

    Args:
        config, dtype: of the drafter, and of its features.
    """

    has_context = True
    can_be_forced = False  # it would keep its own

    def __init__(
        self,
        remote: RemoteDrafter,
        memory: StepMemory,
        max_requests: int,
        max_rows: int,
        config: DrafterConfig,
        dtype: torch.dtype,
    ) -> None:
        self._remote, self._tables, self._margins_N = remote, memory.states.tables, memory.workspace.margins_N
        self.tree_config, device = config, self._margins_N.device
        # The received drafts by row of the blocks, if drafts form chains.
        self._drafts_N = torch.zeros(len(self._margins_N), dtype=torch.int64, device=device)
        self._num_drafts_R = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._chosen_X = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._features_NH = torch.zeros(max_rows, config.hidden_size, dtype=dtype, device=device)

    def receive(self, num_rows: int, trees: StepTrees | None, *, has_grammars: bool) -> None:
        """Wait for the drafts of blocks of `num_rows` rows.

        Zeros without margins replace late ones, or trees without a node. With grammars, which restrict trees,
        trees come with their candidates.
        """
        margins_N, candidates = self._margins_N[:num_rows], list[DraftBuffer]()
        if trees is None:
            drafts = self._drafts_N[:num_rows]
        else:
            drafts = trees.trees.values_RE
            if has_grammars:
                assert trees.candidates is not None, "requests may have grammars"
                ids_NC, scores_NPC = trees.candidates
                candidates = [
                    DraftBuffer(ids_NC[:num_rows], 0),
                    DraftBuffer(scores_NPC[:num_rows], -torch.inf),
                ]
        self._remote.receive([DraftBuffer(drafts, 0), DraftBuffer(margins_N, torch.nan), *candidates])

    def propose(self, requests: DeviceStepRequests, trees: StepTrees | None, *, filters: bool) -> None:
        """Write the received drafts; margins and trees are in their memory already."""
        if trees is None:
            rows = lay_out_block(requests, self._tables, mask_id=0)
            write_drafts(self._drafts_N[: requests.num_rows], rows, self._tables)

    def inject(self, verified: VerifiedRows) -> None:
        """Keep what is sent: with trees, those of the accepted paths, as drafts that were all accepted."""
        requests, trees = verified.requests, verified.trees
        num_drafts_R, chosen_X, taps_NmH = requests.num_drafts_R, verified.chosen_X, verified.taps_NmH
        if trees is not None:
            num_drafts_R = (verified.num_tokens_R - 1).clamp(min=0)
            rows_P = path_rows(requests, trees.trees, verified.num_tokens_R)
            chosen_X, taps_NmH = chosen_X[rows_P], taps_NmH[rows_P]
        self._num_drafts_R[: len(num_drafts_R)].copy_(num_drafts_R)
        self._chosen_X[: len(chosen_X)].copy_(chosen_X)
        features_NH = self._remote.features(taps_NmH)
        if features_NH is not None:
            self._features_NH[: len(features_NH)].copy_(features_NH)

    def send(self, num_requests: int, num_chosen: int, num_rows: int) -> None:
        self._remote.send(
            self._num_drafts_R[:num_requests], self._chosen_X[:num_chosen], self._features_NH[:num_rows]
        )
