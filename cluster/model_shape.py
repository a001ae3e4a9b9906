"""A transformer by its sizes: what its passes move and multiply, and what it holds. Plain arithmetic.

Norms, biases and rotations, less than a thousandth of the rest, are left out. Read by `roofline.py` and
`planner/`; made of checkpoints by `jobs/shapes.py`.

Symbols: E experts of a layer, k of them chosen for a row, I inner size of each, w bytes of a weight.

    dense products, n rows   all weights are read, each with 2 n operations
    experts, n rows          those that some row chose are read; 2 n k/E operations for a weight of all E
    distinct experts         E (1 - (1 - k/E)^n): rows are taken to choose evenly, and each for itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .page_groups import KVGeometry


@dataclass(frozen=True, slots=True)
class Work:
    """What products ask of a device: bytes to move, and floating-point operations."""

    num_bytes: float
    flop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The routed experts of a layer.

    Attributes:
        count: E, of all ranks together.
        chosen: k.
        inter: I, of this rank's part.
        held: how many this rank has, or has a part of.
        shared_inter: inner size of an expert that every row has; 0: there is none.
        weight_bytes: w, as the engine keeps them: 2; 17/32 of MXFP4, which has a scale for 32.
        inner_multiple: what a rank's part of I must be a multiple of; ranks that cannot have whole experts.
    """

    count: int
    chosen: int
    inter: int
    held: int
    shared_inter: int = 0
    weight_bytes: float = 2.0
    inner_multiple: int = 1

    def distinct(self, rows: int) -> float:
        """Of those that are held, how many some of so many rows chose, on average."""
        return self.held * (1.0 - (1.0 - self.chosen / self.count) ** rows)

    def rank(self, ranks: int) -> ExpertShape:
        mine = replace(self, shared_inter=self.shared_inter // ranks)
        if self.inter % (ranks * self.inner_multiple):
            return replace(mine, held=self.held // ranks)
        return replace(mine, inter=self.inter // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A block: grouped-query attention, then a dense MLP, routed experts, or both.

    Attributes:
        head_dim, v_head_dim: values of a query or key, and of a value.
        window: how many tokens back a row sees; None sees all.
        inter: inner size of the dense MLP; 0: there is none.
        gated: what was attended is multiplied by a projection of its size.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    inter: int = 0
    experts: ExpertShape | None = None
    gated: bool = False

    @property
    def kv(self) -> KVGeometry:
        """What a token leaves in this layer."""
        return KVGeometry(self.kv_heads, self.head_dim, self.v_head_dim)

    def dense_params(self, hidden: int) -> int:
        """Weights that every row passes: attention, dense MLP, router and shared expert."""
        attended = self.heads * self.v_head_dim
        outputs = self.heads * self.head_dim + self.kv.width + attended + attended * self.gated
        inner = self.inter if self.experts is None else self.inter + self.experts.shared_inter
        router = 0 if self.experts is None else self.experts.count
        return hidden * (outputs + 3 * inner + router)

    def rank(self, ranks: int) -> LayerShape:
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(self.kv_heads // ranks, 1),
            inter=self.inter // ranks,
            experts=None if self.experts is None else self.experts.rank(ranks),
        )


@dataclass(frozen=True, kw_only=True)  # no slots: sums over layers are kept
class ModelShape:
    """A target, or a drafter (`taps` > 0).

    Attributes:
        taps: tapped blocks that the drafter's fc takes in.
        itemsize: bytes of a weight, but for experts', and of an element of K/V.
    """

    layers: tuple[LayerShape, ...]
    hidden: int
    vocab: int
    taps: int = 0
    itemsize: int = 2

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
        windows: Sequence[int | None] = (),
    ) -> ModelShape:
        """Dense layers that differ by their windows alone; without any, all see all."""
        like = LayerShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, inter=inter)
        blocks = tuple(replace(like, window=window) for window in windows or (None,) * layers)
        return cls(layers=blocks, hidden=hidden, vocab=vocab, taps=taps, itemsize=itemsize)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_geometries(self) -> tuple[KVGeometry, ...]:
        """Of each layer."""
        return tuple(layer.kv for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(layer.window for layer in self.layers)

    @cached_property
    def _kinds(self) -> tuple[tuple[LayerShape, int], ...]:
        return tuple(Counter(self.layers).items())

    @cached_property
    def routed(self) -> tuple[tuple[ExpertShape, int], ...]:
        """Kinds of experts, and how many layers have them."""
        return tuple(Counter(layer.experts for layer in self.layers if layer.experts is not None).items())

    @cached_property
    def widest_inter(self) -> int:
        """Most inner states that a row has at once: of a dense MLP, or of the experts that it chose."""
        chosen = [e.chosen * e.inter + e.shared_inter for e, _ in self.routed]
        return max([*chosen, *(layer.inter for layer in self.layers)])

    @cached_property
    def linear_params(self) -> int:
        """Weights of all blocks, but for routed experts."""
        return sum(times * layer.dense_params(self.hidden) for layer, times in self._kinds)

    def expert_params(self, experts: ExpertShape) -> int:
        """Of one expert, or of the part that is held."""
        return 3 * self.hidden * experts.inter

    @cached_property
    def expert_bytes(self) -> float:
        """Of all routed experts that are held."""
        return sum(n * e.held * self.expert_params(e) * e.weight_bytes for e, n in self.routed)

    @cached_property
    def kv_params(self) -> int:
        """Weights that make K and V."""
        return self.hidden * sum(layer.kv.width for layer in self.layers)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def fc_params(self) -> int:
        return self.taps * self.hidden**2

    @cached_property
    def kv_bytes(self) -> int:
        """K and V of a token, all layers."""
        return self.itemsize * sum(layer.kv.width for layer in self.layers)

    def rank(self, ranks: int) -> ModelShape:
        """What one of so many tensor-parallel ranks holds; K/V heads are repeated where there are fewer."""
        layers = tuple(layer.rank(ranks) for layer in self.layers)
        return replace(self, layers=layers, vocab=-(-self.vocab // ranks))

    def linears(self, rows: int) -> Work:
        """All dense products of the blocks."""
        return Work(self.linear_params * self.itemsize, 2 * self.linear_params * rows)

    def experts(self, rows: int) -> Work:
        """Routed experts, of which only those are read that a row chose."""
        num_bytes = flop = 0.0
        for experts, times in self.routed:
            params = times * self.expert_params(experts)
            num_bytes += experts.distinct(rows) * params * experts.weight_bytes
            flop += 2 * rows * experts.chosen * experts.held / experts.count * params
        return Work(num_bytes, flop)

    def head(self, rows: int) -> Work:
        return Work(self.head_params * self.itemsize, 2 * self.head_params * rows)

    def attention(self, batch: int, rows: int, context: int) -> Work:
        """`rows` of each request."""
        num_bytes = flop = 0
        for layer, times in self._kinds:
            seen = context if layer.window is None else min(context, layer.window)
            keys = times * batch * (seen + rows)
            num_bytes += keys * layer.kv.width * self.itemsize
            flop += 2 * layer.heads * (layer.head_dim + layer.v_head_dim) * rows * keys
        return Work(num_bytes, flop)

    def context(self, rows: int) -> Work:
        """A drafter's context K/V from taps. The weights of K and V are read by its blocks already."""
        return Work(self.fc_params * self.itemsize, 2 * (self.fc_params + self.kv_params) * rows)
