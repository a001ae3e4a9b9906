"""A transformer by its sizes: what its passes move and multiply, and what it holds. Plain arithmetic.

Norms, biases and rotations, under 0.1 % of the rest, are ignored. Used by `roofline.py` and `planner/`;
`jobs/plan/pair_reader.py` makes shapes of checkpoints.

Symbols: E experts of a layer, k of them chosen for a row, I inner size of each, w bytes of a weight.

    dense products, n rows   all weights are read, each with 2 n operations
    recurrent states         each is read and written once in a pass, as are its records
    experts, n rows          those chosen by some row are read; 2 n k/E operations for a weight of all E
    distinct experts         E (1 - (1 - k/E)^n), if rows choose uniformly and independently
    whole experts over ranks the busiest rank's: each has a binomial number of the distinct experts
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..pages.kv_cache_groups import KVCacheSpec
from ..pages.recurrent_state_spec import RecurrentStateSpec
from .kernel_loops import (
    IssuedInstructions,
    attention_instructions,
    latent_instructions,
    max_own_rows,
    product_instructions,
)

NOTHING_ISSUED = IssuedInstructions()
_RULE_FLOP = 7  # per row and element of a state: decay, recall for a key, update, read-out


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


@dataclass(frozen=True, kw_only=True)  # no slots: cached_property needs a __dict__
class ModelShape:
    """A target, or a drafter (`taps` > 0).

    Attributes:
        taps: tapped blocks that the drafter's fc reads; 2 inputs of each layer for multi-token prediction.
        backbone: hidden size of the target between which and its own an assistant has projections as fc.
        itemsize: bytes of a weight and of an activation.
        product_itemsize: mean bytes of a weight in the blocks' dense products and in fc, if different: 1 for
            FP8. `ExpertShape` has those of experts.
        kv_itemsize: bytes of an element of K/V, if different: 1 for FP8.
        packs_fc: whether fc has `product_itemsize`, too; a layer for multi-token prediction has none packed.
    """

    layers: tuple[LayerShape, ...]
    hidden: int
    vocab: int
    taps: int = 0
    backbone: int = 0
    itemsize: int = 2
    product_itemsize: float | None = None
    kv_itemsize: int | None = None
    packs_fc: bool = True

    @classmethod
    def dense(
        cls,
        *,
        layers: int,
        hidden: int,
        inter: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab: int,
        taps: int = 0,
        itemsize: int = 2,
        product_itemsize: float | None = None,
        kv_itemsize: int | None = None,
        windows: Sequence[int | None] = (),
    ) -> ModelShape:
        """Return a model of dense layers that differ only in their windows; all are full by default."""
        layer = LayerShape(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, inter=inter
        )
        blocks = tuple(replace(layer, window=window) for window in windows or (None,) * layers)
        return cls(
            layers=blocks,
            hidden=hidden,
            vocab=vocab,
            taps=taps,
            itemsize=itemsize,
            product_itemsize=product_itemsize,
            kv_itemsize=kv_itemsize,
        )

    @property
    def weight_bytes(self) -> float:
        return self.product_itemsize or self.itemsize

    @property
    def max_own_rows(self) -> int:
        return max_own_rows(self.weight_bytes, self.itemsize)

    @property
    def kv_element_bytes(self) -> int:
        return self.kv_itemsize or self.itemsize

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_geometries(self) -> tuple[KVCacheSpec, ...]:
        return tuple(layer.kv for layer in self._storing)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self._storing)

    @property
    def _storing(self) -> tuple[LayerShape, ...]:
        """Layers with K/V of their own."""
        return tuple(layer for layer in self.layers if layer.state is None and not layer.queries_only)

    @cached_property
    def _states(self) -> tuple[tuple[RecurrentStateSpec, int], ...]:
        return tuple(Counter(layer.state for layer in self.layers if layer.state is not None).items())

    def state_bytes(self, drafts: float) -> float:
        """Return the bytes of a request's states in all layers, with `drafts` records; 0 without any."""
        size = self.itemsize
        return sum(n * (g.state_bytes(size) + drafts * g.record_bytes(size)) for g, n in self._states)

    @cached_property
    def _kinds(self) -> tuple[tuple[LayerShape, int], ...]:
        return tuple(Counter(self.layers).items())

    @cached_property
    def routed(self) -> tuple[tuple[ExpertShape, int], ...]:
        return tuple(Counter(layer.experts for layer in self.layers if layer.experts is not None).items())

    @cached_property
    def widest_inter(self) -> int:
        """Most inner activations of a row at once: of a dense MLP, or of its chosen experts."""
        chosen = [e.chosen * e.inter + e.shared_inter for e, _ in self.routed]
        return max([*chosen, *(layer.inter for layer in self.layers)])

    @cached_property
    def linear_params(self) -> int:
        return sum(times * layer.dense_params(self.hidden) for layer, times in self._kinds)

    def expert_params(self, experts: ExpertShape) -> int:
        return 3 * self.hidden * experts.inter

    @cached_property
    def expert_bytes(self) -> float:
        return sum(n * e.num_held * self.expert_params(e) * e.weight_bytes for e, n in self.routed)

    @cached_property
    def kv_params(self) -> int:
        return self.hidden * sum(kv.width for kv in self.kv_geometries)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def fc_params(self) -> int:
        return self.taps * self.hidden**2 + 3 * self.backbone * self.hidden

    @property
    def fc_bytes(self) -> float:
        return self.fc_params * (self.weight_bytes if self.packs_fc else self.itemsize)

    @cached_property
    def kv_bytes(self) -> int:
        return self.kv_element_bytes * sum(kv.width for kv in self.kv_geometries)

    def rank(self, ranks: int) -> ModelShape:
        """Return the part of one of `ranks` ranks; K/V heads are replicated if there are fewer."""
        layers = tuple(layer.rank(ranks) for layer in self.layers)
        return replace(self, layers=layers, vocab=-(-self.vocab // ranks))

    def linears(self, rows: float) -> DeviceWork:
        num_bytes, issued = self.linear_params * self.weight_bytes, NOTHING_ISSUED
        if rows <= self.max_own_rows:
            issued = product_instructions(self.weight_bytes, num_bytes, rows)
        return DeviceWork(num_bytes, 2 * self.linear_params * rows, issued)

    def experts(self, rows: float) -> DeviceWork:
        works: list[tuple[DeviceWork, int]] = []
        for experts, times in self.routed:
            params, chosen = self.expert_params(experts), experts.distinct(rows)
            num_bytes, rows_each = chosen * params * experts.weight_bytes, experts.rows_of_chosen(rows)
            issued = product_instructions(experts.weight_bytes, num_bytes, rows_each)
            works.append((DeviceWork(num_bytes, 2 * chosen * rows_each * params, issued), times))
        return _sum_of(works)

    def head(self, rows: float) -> DeviceWork:
        return DeviceWork(self.head_params * self.itemsize, 2 * self.head_params * rows)

    def attention(self, batch: int, rows: float, context: float) -> DeviceWork:
        """Return the work of attention for `rows` rows of each request, or for means over requests."""
        works = [
            (layer.attention(rows, context, self.kv_element_bytes), batch * times)
            for layer, times in self._kinds
        ]
        return _sum_of(works)

    def prompt_attention(self, rows: float, context: float) -> DeviceWork:
        works = [
            (layer.prompt_attention(rows, context, self.itemsize), times) for layer, times in self._kinds
        ]
        return _sum_of(works)

    def states(self, batch: int, rows: float) -> DeviceWork:
        """Return the work of recurrent layers: states and records of `rows` rows, read and written."""
        elements = sum(n * g.num_value_heads * g.key_dim * g.value_dim for g, n in self._states)
        return DeviceWork(2 * batch * self.state_bytes(rows - 1), _RULE_FLOP * batch * rows * elements)

    def fc(self, rows: float) -> DeviceWork:
        return DeviceWork(self.fc_bytes, 2 * self.fc_params * rows)

    def context(self, rows: float) -> DeviceWork:
        """Return the work of a drafter's context from taps; its blocks already read K and V weights."""
        return replace(self.fc(rows), flop=2 * (self.fc_params + self.kv_params) * rows)


def _mean_of_largest(count: int, trials: int, share: float) -> float:
    """Return the mean of the largest of `count` independent binomial numbers."""
    mean, at_most = float(trials), 0.0
    for successes in range(trials):
        at_most += math.comb(trials, successes) * share**successes * (1.0 - share) ** (trials - successes)
        mean -= min(at_most, 1.0) ** count
    return mean


def _sum_of(works: Sequence[tuple[DeviceWork, int]]) -> DeviceWork:
    return DeviceWork(
        sum(count * work.num_bytes for work, count in works),
        sum(count * work.flop for work, count in works),
        sum((work.issued.times(count) for work, count in works), NOTHING_ISSUED),
    )
