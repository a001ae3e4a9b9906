"""The target: a pre-norm decoder over paged K/V, one implementation for every family.

Stateless: requests' K/V are in the cache it is given. Its blocks are a backend's
(`drafter/compute/backend.py`), over products that are split between ranks. Called by the runners; the drafter
borrows its embedding and head.

    token ids --embedding--> x --blocks, some tapped behind them--> norm --head--> logits

Legend: N rows, X sampled rows, H hidden, m taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....drafter.compute.backend import AttentionShape, Backend, BlockWeights, PlacedRows
from ....drafter.compute.eager.backend import TorchBackend
from ....drafter.compute.kv_cache import PagedKVCache
from ....drafter.compute.layers import RMSNorm
from ....drafter.compute.rope import RotaryEmbedding
from .config import TargetConfig
from .parallel import Communicator, Sharding, VocabEmbedding, VocabHead, row_linear
from .weights import LayerWeights, TargetWeights


class Decoder:
    """One rank's part of a target.

    Args:
        weights: where the slices come from; read here, layer by layer.
        tap_ids: 0-based blocks whose outputs the drafter wants, in its order; may be empty.
        max_positions: positions that may occur.
        backend: computes what is no matrix product; PyTorch's own by default.
    """

    def __init__(
        self,
        weights: TargetWeights,
        tap_ids: Sequence[int],
        max_positions: int,
        communicator: Communicator,
        backend: Backend | None = None,
    ) -> None:
        config, sharding = weights.config, weights.sharding
        self.config = config
        self._sharding = sharding
        embedding_UH = weights.embedding()
        self.dtype, self.device = embedding_UH.dtype, embedding_UH.device
        head_UH = embedding_UH if config.tied_head else weights.head()
        self._embedding = VocabEmbedding(embedding_UH, sharding, communicator)
        backend = backend or TorchBackend()
        self._head = VocabHead(backend.linear(head_UH), config.vocab_size, sharding, communicator)
        rope = RotaryEmbedding(config.rope, max_positions, self.dtype, self.device)
        blocks = [
            _block(config, sharding, weights.layer(i), window, communicator, backend)
            for i, window in enumerate(config.windows)
        ]
        final_norm = RMSNorm(weights.final_norm(), config.rms_norm_eps)
        self._stack = backend.stack(blocks, final_norm, rope, tap_ids)

    @property
    def vocab_range(self) -> slice:
        """Token ids of this rank's part of the head."""
        return self._sharding.vocab

    def new_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """Pages for this rank's K/V heads."""
        return PagedKVCache(
            self.config.num_layers,
            num_pages,
            page_size,
            self._sharding.num_kv_heads,
            self.config.head_dim,
            self.dtype,
            self.device,
        )

    def page_bytes(self, page_size: int) -> int:
        """Memory of one page of `new_cache`."""
        c = self.config
        return PagedKVCache.bytes_per_page(
            c.num_layers, page_size, self._sharding.num_kv_heads, c.head_dim, self.dtype
        )

    def embed(self, token_ids_N: Tensor) -> Tensor:
        """Input embeddings [N, H]."""
        return self._embedding(token_ids_N)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """The head [N, V] on states that are normed already."""
        return self._head(hidden_NH)

    def local_logits(self, hidden_NH: Tensor) -> tuple[Tensor, int]:
        """The head over this rank's part of the vocabulary, and the first token id of that part."""
        return self._head.local(hidden_NH)

    def forward(
        self, token_ids_N: Tensor, rows: PlacedRows, cache: PagedKVCache
    ) -> tuple[Tensor, Tensor | None]:
        """Run a step's rows, writing their K/V.

        Returns:
            normed hidden states [N, H]; taps [N, m, H], or None without taps.
        """
        return self._stack(self._embedding(token_ids_N), rows, cache)


def _block(
    config: TargetConfig,
    sharding: Sharding,
    weights: LayerWeights,
    window: int | None,
    communicator: Communicator,
    backend: Backend,
) -> tuple[AttentionShape, BlockWeights]:
    eps = config.rms_norm_eps
    shape = AttentionShape(
        num_heads=sharding.num_heads,
        num_kv_heads=sharding.num_kv_heads,
        head_dim=config.head_dim,
        q_norm_D=weights.q_norm_D,
        k_norm_D=weights.k_norm_D,
        eps=eps,
        window=window,
    )
    parts = BlockWeights(
        input_norm=RMSNorm(weights.input_norm_H, eps),
        qkv=backend.linear(weights.qkv_OH, weights.qkv_bias_O),
        o=row_linear(weights.o_HO, weights.o_bias_H, communicator, backend),
        post_norm=RMSNorm(weights.post_norm_H, eps),
        gate_up=backend.linear(weights.gate_up_IH, weights.gate_up_bias_I),
        down=row_linear(weights.down_HI, weights.down_bias_H, communicator, backend),
    )
    return shape, parts
