"""A transformer by its sizes: what its passes move and multiply, and what it holds. Plain arithmetic.

Norms, biases and rotations, less than a thousandth of the rest, are left out. Read by `roofline.py` and
`planner/`; made of checkpoints by `jobs/shapes.py`.

Symbols: E experts of a layer, k of them chosen for a row, I inner size of each, w bytes of a weight.

    dense products, n rows   all weights are read, each with 2 n operations
    recurrent states         each is read and written once in a pass, its records likewise
    experts, n rows          those that some row chose are read; 2 n k/E operations for a weight of all E
    distinct experts         E (1 - (1 - k/E)^n): rows are taken to choose evenly, and each for itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .page_groups import KVGeometry
from .state_shape import StateGeometry

_RULE_FLOP = 7  # of a row, for each element of a state: decay, what it says of a key, what is added, read


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
        weight_bytes: w, as the engine keeps them: 2; 17/32 of MXFP4 and 18/32 of INT4, with a scale for 32.
        inner_multiple: what a rank's part of I must be a multiple of; ranks that cannot have whole experts.
    """

    count: int
    chosen: int
    inter: int
    held: int
    shared_inter: int = 0
    weight_bytes: float = 2.0
    inner_multiple: int = 1

    def distinct(self, rows: float) -> float:
        """Of those that are held, how many some of so many rows chose, on average."""
        return self.held * (1.0 - (1.0 - self.chosen / self.count) ** rows)

    def rank(self, ranks: int) -> ExpertShape:
        mine = replace(self, shared_inter=self.shared_inter // ranks)
        if self.inter % (ranks * self.inner_multiple):
            return replace(mine, held=self.held // ranks)
        return replace(mine, inter=self.inter // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """What attention over latents has beside them (`drafter/compute/latent.py` says what they are).

    Attributes:
        q_rank: of the queries' bottleneck; None: there is none.
        nope_dim, rope_dim, v_dim: of a head's queries and keys, not rotated and rotated; of its values.
        rank: of a latent.
    """

    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    rank: int

    def params(self, heads: int, hidden: int) -> int:
        """Weights of all products of attention; what goes down to latents is whole on every rank."""
        q_inputs, q_dim = self.q_rank or hidden, self.nope_dim + self.rope_dim
        down = hidden * ((self.q_rank or 0) + self.rank + self.rope_dim)
        return down + heads * (
            q_inputs * q_dim + self.rank * (self.nope_dim + self.v_dim) + self.v_dim * hidden
        )

    def expanded(self, heads: int, pairs: float, keys: float, itemsize: int) -> Work:
        """Scores and values of so many pairs of a row and a key, over heads' own keys and values, which are
        made of so many latents: these are gathered, and what is made of them is written and read."""
        made = self.nope_dim + self.v_dim
        flop = 2 * heads * (pairs * (made + self.rope_dim) + keys * made * self.rank)
        return Work(keys * itemsize * (3 * (self.rank + self.rope_dim) + 2 * heads * made), flop)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A block: grouped-query attention or a delta rule, then a dense MLP, routed experts, or both.

    Attributes:
        heads, kv_heads: 0 where there is a delta rule.
        head_dim, v_head_dim: values of a query or key, and of a value; of latents, as they are cached.
        window: how many tokens back a row sees; None sees all.
        inter: inner size of the dense MLP; 0: there is none.
        gated: what was attended is multiplied by a projection of its size.
        latent: keys and values are latents; None: they are heads' own.
        state: of a delta rule, which is in attention's place.
    """

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None
    inter: int = 0
    experts: ExpertShape | None = None
    gated: bool = False
    latent: LatentShape | None = None
    state: StateGeometry | None = None

    @property
    def kv(self) -> KVGeometry:
        """What a token leaves in this layer."""
        return KVGeometry(self.kv_heads, self.head_dim, self.v_head_dim, v_in_k=self.latent is not None)

    def dense_params(self, hidden: int) -> int:
        """Weights that every row passes: attention or delta rule, dense MLP, router and shared expert."""
        inner = self.inter if self.experts is None else self.inter + self.experts.shared_inter
        router = 0 if self.experts is None else self.experts.count
        return self._attention_params(hidden) + hidden * (3 * inner + router)

    def _attention_params(self, hidden: int) -> int:
        if self.latent is not None:
            return self.latent.params(self.heads, hidden)
        attended = self.heads * self.v_head_dim
        outputs = self.heads * self.head_dim + self.kv.width + attended + attended * self.gated
        if self.state is not None:  # convolved, gate and output, two numbers a head
            heads = self.state.num_value_heads
            outputs += self.state.channels + 2 * heads * (self.state.value_dim + 1)
        return hidden * outputs

    def attention(self, rows: float, context: float, itemsize: int) -> Work:
        """Scores and values of a request's rows, over all its keys; of latents absorbed."""
        keys = rows + (context if self.window is None else min(context, self.window))
        # Absorbed, a latent is key and value at once.
        flop = 2 * self.heads * (self.head_dim + self.v_head_dim) * rows * keys
        return Work(keys * self.kv.width * itemsize, flop)

    def prompt_attention(self, rows: float, context: float, itemsize: int) -> Work:
        """The same on a GPU that promises no bits: latents in whichever form is fewer operations."""
        absorbed = self.attention(rows, context, itemsize)
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


@dataclass(frozen=True, kw_only=True)  # no slots: sums over layers are kept
class ModelShape:
    """A target, or a drafter (`taps` > 0).

    Attributes:
        taps: tapped blocks that the drafter's fc takes in.
        itemsize: bytes of a weight and of an element of K/V.
        product_itemsize: of a weight of its blocks' dense products and of fc, if it is another: 1 in FP8. Of
            experts' weights see `ExpertShape`.
    """

    layers: tuple[LayerShape, ...]
    hidden: int
    vocab: int
    taps: int = 0
    itemsize: int = 2
    product_itemsize: int | None = None

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
        product_itemsize: int | None = None,
        windows: Sequence[int | None] = (),
    ) -> ModelShape:
        """Dense layers that differ by their windows alone; without any, all see all."""
        like = LayerShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, inter=inter)
        blocks = tuple(replace(like, window=window) for window in windows or (None,) * layers)
        return cls(
            layers=blocks,
            hidden=hidden,
            vocab=vocab,
            taps=taps,
            itemsize=itemsize,
            product_itemsize=product_itemsize,
        )

    @property
    def weight_bytes(self) -> int:
        """Of a weight of a dense product."""
        return self.product_itemsize or self.itemsize

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_geometries(self) -> tuple[KVGeometry, ...]:
        """Of each layer with K/V."""
        return tuple(layer.kv for layer in self.layers if layer.state is None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer with K/V."""
        return tuple(layer.window for layer in self.layers if layer.state is None)

    @cached_property
    def _states(self) -> tuple[tuple[StateGeometry, int], ...]:
        return tuple(Counter(layer.state for layer in self.layers if layer.state is not None).items())

    def state_bytes(self, drafts: float) -> float:
        """Of a request's state in all recurrent layers, with the records of so many drafts; 0 without any."""
        size = self.itemsize
        return sum(n * (g.state_bytes(size) + drafts * g.record_bytes(size)) for g, n in self._states)

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

    def linears(self, rows: float) -> Work:
        """All dense products of the blocks."""
        return Work(self.linear_params * self.weight_bytes, 2 * self.linear_params * rows)

    def experts(self, rows: float) -> Work:
        """Routed experts, of which only those are read that a row chose."""
        num_bytes = flop = 0.0
        for experts, times in self.routed:
            params = times * self.expert_params(experts)
            num_bytes += experts.distinct(rows) * params * experts.weight_bytes
            flop += 2 * rows * experts.chosen * experts.held / experts.count * params
        return Work(num_bytes, flop)

    def head(self, rows: float) -> Work:
        return Work(self.head_params * self.itemsize, 2 * self.head_params * rows)

    def attention(self, batch: int, rows: float, context: float) -> Work:
        """`rows` of each request; where requests differ, their means."""
        works = [
            (layer.attention(rows, context, self.itemsize), batch * times) for layer, times in self._kinds
        ]
        return _sum_of(works)

    def prompt_attention(self, rows: float, context: float) -> Work:
        """Of a prompt's rows on a GPU; see `LayerShape.prompt_attention`."""
        works = [
            (layer.prompt_attention(rows, context, self.itemsize), times) for layer, times in self._kinds
        ]
        return _sum_of(works)

    def states(self, batch: int, rows: float) -> Work:
        """Recurrent layers over `rows` of each request: its state and as many records, in and out again."""
        elements = sum(n * g.num_value_heads * g.key_dim * g.value_dim for g, n in self._states)
        return Work(2 * batch * self.state_bytes(rows - 1), _RULE_FLOP * batch * rows * elements)

    def context(self, rows: float) -> Work:
        """A drafter's context K/V from taps. The weights of K and V are read by its blocks already."""
        return Work(self.fc_params * self.weight_bytes, 2 * (self.fc_params + self.kv_params) * rows)


def _sum_of(works: Sequence[tuple[Work, int]]) -> Work:
    """Each so many times."""
    return Work(
        sum(times * work.num_bytes for work, times in works), sum(times * work.flop for work, times in works)
    )
