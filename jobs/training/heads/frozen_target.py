"""The frozen target in a drafter's training: features, embeddings and head.

It runs the engine's own forward pass, so any supported target can be used (all families, quantized
checkpoints, experts), and the drafter is trained on the same features as in serving. Built from the same
`ResolvedConfig` as an engine, with all layers in one page group, since nothing is kept between batches. Its
weights get no gradients.

Shapes: B sequences, T tokens, N = B * T rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from ....actors.checkpoints.checkpoint_paths import resolve_checkpoint
from ....actors.targets.families import read_model
from ....actors.targets.loading.operator_factory import make_backend
from ....actors.targets.loading.rank_loader import Checkpoints
from ....actors.targets.loading.resolved_config import resolve_config
from ....actors.targets.model.decoder import Decoder
from ....actors.targets.model.tensor_parallel import Sharding, SingleRank
from ....cluster.config import EngineConfig
from ....cluster.pages.kv_cache_groups import pages_for
from ....drafter.compute.backend import PlacedRows
from ....drafter.compute.eager.backend import EagerBackend
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.compute.memory.recurrent_state_cache import StateMemory, StateRows
from ..loop.precision import product_dtype


class FrozenTarget:
    """Runs the target for training; `layer_ids` are 0-based, in the drafter's order."""

    @torch.no_grad()
    def __init__(
        self, target: str | Path, layer_ids: Sequence[int], max_tokens: int, device: torch.device
    ) -> None:
        settings = {"model": str(target), "device": device.type, "skip_tokenizer_init": True}
        if device.type == "cpu":
            stored = read_model(resolve_checkpoint(str(target), field="target")).dtype
            settings["attention_backend"] = "torch"
            in_fp32 = stored == "float32" or product_dtype("cpu") is torch.float32
            settings["dtype"] = "float32" if in_fp32 else "bfloat16"
        resolved = resolve_config(EngineConfig.from_dict(settings))
        self.spec, self.device, self.dtype = resolved.target, device, resolved.dtype
        self.weights = Checkpoints(dequantizes=True).target(resolved, Sharding(resolved.target, 0, 1))
        # The compiled backends have their own threads, which would compete with those of training.
        self._backend = EagerBackend() if device.type == "cpu" else make_backend(resolved)
        positions = max_tokens + 1
        self._decoder = Decoder(self.weights, layer_ids, positions, SingleRank(), self._backend)
        self._head_VD = self.weights.head()
        self._page_size = resolved.page_size
        self._cache: PagedKVCache | None = None

    @torch.no_grad()
    def read(self, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tapped features [B, T, taps * D] and the head's inputs [B, T, D], in the target's dtype."""
        shape = tokens_BT.shape
        rows = self._rows(*shape)
        assert self._cache is not None
        with torch.autocast(self.device.type, enabled=False):  # the engine chooses its dtypes
            hidden_ND, taps_NmD = self._decoder.forward(tokens_BT.flatten(), rows, self._cache)
        assert taps_NmD is not None, "a drafter has taps"
        return taps_NmD.flatten(1).unflatten(0, shape), hidden_ND.unflatten(0, shape)

    @torch.no_grad()
    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return the target's own logits [N, V]."""
        with torch.autocast(self.device.type, enabled=False):
            return self._decoder.logits(hidden_ND)

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return token embeddings as the drafter gets them in serving, [..., D]."""
        return self._decoder.shared_embeddings.embed(tokens.flatten()).view(*tokens.shape, -1)

    def head(self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the head's logits of a drafter's hidden states, of all tokens or of these."""
        head_VD = self._head_VD if token_ids is None else self._head_VD[token_ids]
        # Contiguous, else torch copies the head.
        return F.linear(hidden.to(self.dtype).contiguous(), head_VD)

    def _rows(self, num_sequences: int, num_tokens: int) -> PlacedRows:
        pages = pages_for(num_tokens, self._page_size)
        self._make_room(num_sequences, pages)
        counts_B = np.full(num_sequences, num_tokens, dtype=np.int64)
        first_B = np.zeros_like(counts_B)
        pages_BP = np.arange(num_sequences * pages, dtype=np.int64).reshape(num_sequences, pages)
        batch = self._backend.attention_batch(first_B, counts_B, pages_BP, self._page_size, self.device)
        positions_T = torch.arange(num_tokens, device=self.device)
        starts_B1 = torch.arange(num_sequences, device=self.device)[:, None] * pages * self._page_size
        return PlacedRows(
            positions_N=positions_T.repeat(num_sequences),
            kv_slots=((starts_B1 + positions_T).flatten(),),
            batches=(batch,),
            states=StateRows(np.arange(num_sequences), counts_B, first_B, first_B),
        )

    def _make_room(self, num_sequences: int, pages: int) -> None:
        cache, states = self._cache, None
        if self.spec.states is not None:
            states = StateMemory(*self.spec.states, num_sequences, 1, self.dtype, self.device)
        if states is not None or cache is None or cache.num_pages < num_sequences * pages:
            self._cache = self._decoder.new_cache(num_sequences * pages, self._page_size, states)
