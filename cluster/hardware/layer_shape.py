"""A layer by its sizes: what its weights are, and what attention over a context moves and multiplies.

Plain arithmetic. `model_shape.py` adds layers up.

Symbols: E experts of a layer, k of them chosen for a row, I inner size of each, w bytes of a weight.

    experts, n rows          those chosen by some row are read; 2 n k/E operations for a weight of all E
    distinct experts         E (1 - (1 - k/E)^n), if rows choose uniformly and independently
    whole experts over ranks the busiest rank's: each has a binomial number of the distinct experts
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..pages.kv_cache_groups import KVCacheSpec
from ..pages.recurrent_state_spec import RecurrentStateSpec
from .kernel_loops import (
    EXPERT_TILES,
    IssuedInstructions,
    attention_instructions,
    latent_instructions,
    tile_rows,
)

NOTHING_ISSUED = IssuedInstructions()


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The demands of products on a device: bytes to move, floating-point operations, and instructions.

    `issued` are those of Manta's kernels on GPUs (`kernel_loops.py`); none for other products.
    """

    num_bytes: float
    flop: float
    issued: IssuedInstructions = NOTHING_ISSUED


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The routed experts of a layer.

    Attributes:
        count: E, over all ranks.
        chosen: k.
        inter: I, of this rank's part.
        num_held: experts of which this rank has all or a part.
        shared_inter: inner size of a shared expert; 0 for none.
        weight_bytes: w in the engine: 2; 17/32 for MXFP4 and 18/32 for INT4, with a scale per 32 weights.
        inner_multiple: a rank's part of I must be a multiple of this; otherwise ranks have whole experts.
        num_ranks: ranks among which whole experts are divided; the step waits for the busiest of them.
    """

    count: int
    chosen: int
    inter: int
    num_held: int
    shared_inter: int = 0
    weight_bytes: float = 2.0
    inner_multiple: int = 1
    num_ranks: int = 1

    def distinct(self, rows: float) -> float:
        """Return the mean number of held experts, of the busiest rank, that any of `rows` rows chooses."""
        if self.num_ranks > 1:
            return _mean_of_largest(self.num_ranks, self.num_held, self._chosen_share(rows))
        return self.num_held * self._chosen_share(rows)

    def rows_of_chosen(self, rows: float) -> float:
        """Return the mean number of rows of an expert that at least one of `rows` rows chooses."""
        share = self._chosen_share(rows)
        return rows * self.chosen / self.count / share if share else 0.0

    def tile_rows(self, rows: float) -> int:
        """Return the rows of a kernel's tile: twice the mean of all experts, chosen or not."""
        return tile_rows(2 * rows * self.chosen / self.count, EXPERT_TILES)

    def _chosen_share(self, rows: float) -> float:
        return 1.0 - (1.0 - self.chosen / self.count) ** rows

    def rank(self, ranks: int) -> ExpertShape:
        shape = replace(self, shared_inter=self.shared_inter // ranks)
        if self.inter % (ranks * self.inner_multiple):
            return replace(shape, num_held=self.num_held // ranks, num_ranks=ranks)
        return replace(shape, inter=self.inter // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Additional sizes of latent attention (see `drafter/compute/layers/mla.py`).

    Attributes:
        q_rank: size of the queries' bottleneck; None without one.
        nope_dim, rope_dim, v_dim: sizes per head: queries and keys without and with rotation; values.
        rank: size of a latent.
    """

    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    rank: int

    def params(self, heads: int, hidden: int) -> int:
        q_inputs, q_dim = self.q_rank or hidden, self.nope_dim + self.rope_dim
        down = hidden * ((self.q_rank or 0) + self.rank + self.rope_dim)
        return down + heads * (
            q_inputs * q_dim + self.rank * (self.nope_dim + self.v_dim) + self.v_dim * hidden
        )

    def expanded(self, heads: int, pairs: float, keys: float, itemsize: int) -> DeviceWork:
        """Return the work of expanded MLA: `keys` latents are gathered, expanded, written and read."""
        kv_dim = self.nope_dim + self.v_dim
        flop = 2 * heads * (pairs * (kv_dim + self.rope_dim) + keys * kv_dim * self.rank)
        return DeviceWork(keys * itemsize * (3 * (self.rank + self.rope_dim) + 2 * heads * kv_dim), flop)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A block: grouped-query attention or a delta net, then a dense MLP, routed experts, or both.

    Attributes:
        heads, kv_heads: 0 for a delta net.
        head_dim, v_head_dim: sizes of a query or key, and of a value; with latents, as they are cached.
        window: tokens that a row sees; None for all.
        inter: inner size of the dense MLP; 0 for none.
        gated: the attention output is multiplied by a projection of its size.
        queries_only: keys and values are another model's: the layer neither makes nor stores any.
        latent: sizes of latent attention; None if keys and values are per head.
        state: state sizes of a delta net, which replaces attention.
    """

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None
    inter: int = 0
    experts: ExpertShape | None = None
    gated: bool = False
    queries_only: bool = False
    latent: LatentShape | None = None
    state: RecurrentStateSpec | None = None

    @property
    def kv(self) -> KVCacheSpec:
        return KVCacheSpec(self.kv_heads, self.head_dim, self.v_head_dim, v_in_k=self.latent is not None)

    def dense_params(self, hidden: int) -> int:
        """Return the number of weights that every row uses, including router and shared expert."""
        inner = self.inter if self.experts is None else self.inter + self.experts.shared_inter
        router = 0 if self.experts is None else self.experts.count
        return self._attention_params(hidden) + hidden * (3 * inner + router)

    def _attention_params(self, hidden: int) -> int:
        if self.latent is not None:
            return self.latent.params(self.heads, hidden)
        attended = self.heads * self.v_head_dim
        kv_width = 0 if self.queries_only else self.kv.width
        outputs = self.heads * self.head_dim + kv_width + attended + attended * self.gated
        if self.state is not None:  # convolution channels, gate and output, two values per head
            heads = self.state.num_value_heads
            outputs += self.state.channels + 2 * heads * (self.state.value_dim + 1)
        return hidden * outputs

    def attention(self, rows: float, context: float, itemsize: int) -> DeviceWork:
        """Return the work of a request's scores and values over all its keys; latents absorbed."""
        keys = rows + (context if self.window is None else min(context, self.window))
        # Absorbed, a latent is both key and value.
        flop = 2 * self.heads * (self.head_dim + self.v_head_dim) * rows * keys
        num_bytes = keys * self.kv.width * itemsize
        tile_rows = rows * self.heads / max(self.kv_heads, 1)
        instructions = attention_instructions if self.latent is None else latent_instructions
        return DeviceWork(num_bytes, flop, instructions(itemsize, num_bytes, tile_rows))

    def prompt_attention(self, rows: float, context: float, itemsize: int) -> DeviceWork:
        """Return the work for a prompt on a GPU, with latents in the cheaper of both forms.

        Its loop is bound by products, not by instructions.
        """
        absorbed = replace(self.attention(rows, context, itemsize), issued=NOTHING_ISSUED)
        if self.latent is None:
            return absorbed
        keys = rows + context
        expanded = self.latent.expanded(self.heads, rows * keys, keys, itemsize)
        return min(absorbed, expanded, key=lambda work: work.flop)

    def rank(self, ranks: int) -> LayerShape:
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(self.kv_heads // ranks, 1) if self.kv_heads else 0,
            state=None if self.state is None else self.state.rank(ranks),
            inter=self.inter // ranks,
            experts=None if self.experts is None else self.experts.rank(ranks),
        )


def _mean_of_largest(count: int, trials: int, share: float) -> float:
    """Return the mean of the largest of `count` independent binomial numbers."""
    mean, at_most = float(trials), 0.0
    for successes in range(trials):
        at_most += math.comb(trials, successes) * share**successes * (1.0 - share) ** (trials - successes)
        mean -= min(at_most, 1.0) ** count
    return mean
