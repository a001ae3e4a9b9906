"""A transformer by its sizes: what its passes move and multiply, and what it holds. Plain arithmetic.

Norms, biases and rotations, under 0.1 % of the rest, are ignored. Layers are in `layer_shape.py`. Used by
`roofline.py` and `planner/`; `jobs/plan/pair_reader.py` makes shapes of checkpoints.

    dense products, n rows   all weights are read, each with 2 n operations
    recurrent states         each is read and written once in a pass, as are its records
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..pages.kv_cache_groups import KVCacheSpec
from ..pages.recurrent_state_spec import RecurrentStateSpec
from .kernel_loops import dense_instructions, max_own_rows, product_instructions
from .layer_shape import NOTHING_ISSUED, DeviceWork, ExpertShape, LayerShape

_RULE_FLOP = 7  # per row and element of a state: decay, recall for a key, update, read-out


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
            issued = dense_instructions(self.weight_bytes, num_bytes, rows)
        return DeviceWork(num_bytes, 2 * self.linear_params * rows, issued)

    def experts(self, rows: float) -> DeviceWork:
        works: list[tuple[DeviceWork, int]] = []
        for experts, times in self.routed:
            params, chosen = self.expert_params(experts), experts.distinct(rows)
            num_bytes, rows_each = chosen * params * experts.weight_bytes, experts.rows_of_chosen(rows)
            tile = experts.tile_rows(rows)
            issued = product_instructions(experts.weight_bytes, num_bytes, rows_each, tile)
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


def _sum_of(works: Sequence[tuple[DeviceWork, int]]) -> DeviceWork:
    return DeviceWork(
        sum(count * work.num_bytes for work, count in works),
        sum(count * work.flop for work, count in works),
        sum((work.issued.times(count) for work, count in works), NOTHING_ISSUED),
    )
