"""The target: a pre-norm decoder over paged K/V, one implementation for every family.

Stateless: requests' K/V are in the cache it is given. Its blocks are `drafter/block.py`'s, over products that
are split between ranks. Called by the runners; the drafter borrows its embedding and head.

    token ids --embedding--> x --blocks, some tapped behind them--> norm --head--> logits

Legend: N rows, X sampled rows, H hidden, m taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...drafter.backend import AttentionShape, Backend, PlacedRows, TorchBackend
from ...drafter.block import BlockWeights, DecoderBlock
from ...drafter.features import stack_taps
from ...drafter.kv_cache import PagedKVCache
from ...drafter.layers import Linear, RMSNorm, RotaryEmbedding
from .config import TargetConfig
from .parallel import Communicator, RowLinear, Sharding, VocabEmbedding, VocabHead
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
        self._backend = backend or TorchBackend()
        self.config = config
        self._sharding = sharding
        self._tap_ids = tuple(tap_ids)
        embedding_UH = weights.embedding()
        self.dtype, self.device = embedding_UH.dtype, embedding_UH.device
        head_UH = embedding_UH if config.tied_head else weights.head()
        self._embedding = VocabEmbedding(embedding_UH, sharding, communicator)
        self._head = VocabHead(head_UH, config.vocab_size, sharding, communicator)
        self._blocks = [
            _block(config, sharding, weights.layer(i), window, communicator, self._backend)
            for i, window in enumerate(config.windows)
        ]
        self._final_norm = RMSNorm(weights.final_norm(), config.rms_norm_eps)
        self._next_norms = [*(block.input_norm for block in self._blocks[1:]), self._final_norm]
        self._rope = RotaryEmbedding(config.rope, max_positions, self.dtype, self.device)

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
        x_NH = self._embedding(token_ids_N)
        normed_NH = self._backend.norm(self._blocks[0].input_norm, x_NH)
        step = self._backend.begin(self._rope, rows)
        tapped: dict[int, Tensor] = {}
        for i, (block, next_norm) in enumerate(zip(self._blocks, self._next_norms, strict=True)):
            x_NH, normed_NH = block(x_NH, normed_NH, step, cache, i, next_norm)
            if i in self._tap_ids:
                tapped[i] = x_NH
        return normed_NH, stack_taps([tapped[i] for i in self._tap_ids]) if tapped else None


def _block(
    config: TargetConfig,
    sharding: Sharding,
    weights: LayerWeights,
    window: int | None,
    communicator: Communicator,
    backend: Backend,
) -> DecoderBlock:
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
        qkv=Linear(weights.qkv_OH, weights.qkv_bias_O),
        o=RowLinear(weights.o_HO, weights.o_bias_H, communicator),
        post_norm=RMSNorm(weights.post_norm_H, eps),
        gate_up=Linear(weights.gate_up_IH, weights.gate_up_bias_I),
        down=RowLinear(weights.down_HI, weights.down_bias_H, communicator),
    )
    return DecoderBlock(backend, shape, parts)
