"""Roofline estimate of the seconds of a round: draft, verify and inject for all requests of an engine.

Adds to the roofline's floor per rank: the instructions of the kernels' loops, an overhead per kernel launch,
the all-reduces over ranks, and the traffic to a drafter on a GPU of its own. Leaves out HTTP, interleaved
prompts and GEMMs too small to reach the sustained rates (a few hundred rows reach about 80 % of the
arithmetic).

    colocated   draft + verify + inject, the drafter whole on every rank, its head sharded over them
    split       the same in sequence, or one half drafted while the other is verified, if that takes less
    shared      as split, plus waiting while the drafter serves the other engines

A chain has a pass per draft. EAGLE-3's drafter is whole on every rank; the target's own layer (MTP) is
sharded like the target, with sums over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from .gpu_specs import Gpu
from .layer_shape import DeviceWork
from .model_pair import ModelPair
from .model_shape import ModelShape
from .parallel_layouts import ParallelLayout

# Estimated in docs/benchmarks/gpu.md: seconds each kernel takes beyond its roofline floor.
LAUNCH_S = 3e-6
# Kernels of a step, counted by tests/drafter/gpu_triton/test_launches.py: of a layer; outside the layers of
# target and drafter together; more of a layer with experts (norm, router, choice, tiles, two GEMMs, a sum and
# a norm instead of two GEMMs); more of one without, over ranks (residual and norm apart from the two sums);
# more over ranks for embedding and choice of tokens, of the target and of the drafter.
LAUNCHES_PER_LAYER, LAUNCHES_AROUND = 6, 27
LAUNCHES_OF_EXPERTS, LAUNCHES_OF_SUMS = 6, 2
LAUNCHES_OVER_RANKS, LAUNCHES_OF_DRAFTS_OVER_RANKS = 11, 19
# More of a layer without experts if rows are too many for our products, which fuse a gate and, on one rank,
# two norms; and one more for each product of codes, which is dequantized.
LAUNCHES_UNFUSED, LAUNCHES_UNFUSED_OVER_RANKS = 3, 1
PRODUCTS_PER_LAYER, PRODUCTS_BESIDE_EXPERTS = 4, 2
# The largest sum over ranks that is made in one launch with the residual and the norm after it: each rank
# reads all others' parts. Each row has its own memory, of a width that no published model reaches.
FUSED_SUM_ROWS, FUSED_SUM_BYTES, FUSED_SUM_WIDTH = 128, 256 * 1024, 16 * 1024
LAUNCHES_OF_TREES = 6  # more of a step than with chains, to grow, place, move and report trees
TREE_NODE_BYTES = 16  # of a node that a separate drafter sends: token, parent, rank and survival
LAUNCHES_OF_DRAFT = 5  # outside the layers of a pass for one draft: embedding, fc, norm, head, argmax


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Seconds by bottleneck.

    Attributes:
        instructions: where a kernel's loop takes longer to issue than its bytes to read.
        link: between GPUs.
        queue: waiting while a drafter serves others.
    """

    bytes: float = 0.0
    arithmetic: float = 0.0
    instructions: float = 0.0
    link: float = 0.0
    launches: float = 0.0
    queue: float = 0.0

    def __add__(self, other: DeviceTime) -> DeviceTime:
        return DeviceTime(*(getattr(self, name) + getattr(other, name) for name in _BOTTLENECKS))

    def times(self, count: float) -> DeviceTime:
        return DeviceTime(*(getattr(self, name) * count for name in _BOTTLENECKS))

    @property
    def total_s(self) -> float:
        return sum(getattr(self, name) for name in _BOTTLENECKS)

    @property
    def bound(self) -> str:
        return max(_BOTTLENECKS, key=lambda name: getattr(self, name))


_BOTTLENECKS = tuple(field.name for field in fields(DeviceTime))


@dataclass(frozen=True, slots=True)
class Chunk:
    rows: int = 0
    context: int = 0


NO_CHUNK = Chunk()


class StepTimes:
    def __init__(self, pair: ModelPair, gpu: Gpu, layout: ParallelLayout) -> None:
        self._gpu, self._layout = gpu, layout
        self._target, self._hidden = pair.target.rank(layout.tp), pair.target.hidden
        self._drafter = pair.drafter_rank(layout.tp) if layout.placement else None
        self._chain, self._chain_pass = pair.chain, self._drafter
        if self._drafter is not None and pair.chain == "mtp":  # a pass runs one of the layers
            first, taps = self._drafter.layers[:1], self._drafter.taps // self._drafter.num_layers
            self._chain_pass = replace(self._drafter, layers=first, taps=taps)
        shares_head = pair.drafter is not None and pair.drafter.vocab == pair.target.vocab
        shares_head = shares_head and pair.chain in (None, "mtp")
        self._draft_head = (
            self._target if shares_head and not layout.has_drafter_gpu else self._drafter or self._target
        )

    @property
    def overlaps(self) -> bool:
        """Whether drafter and target run concurrently, so that a round is not the sum of its parts."""
        return self._layout.has_drafter_gpu

    def verify(self, batch: int, rows: float, context: float, chunk: Chunk = NO_CHUNK) -> DeviceTime:
        """Return the time of the target's pass over mean rows and context, and a chunk; plain rows = 1."""
        target, tokens = self._target, batch * rows + chunk.rows
        num_routed = sum(times for _, times in target.routed)
        works = [target.linears(tokens), target.experts(tokens), target.head(batch * rows + 1)]
        works.append(_dequantization(target, tokens))
        works += [target.attention(batch, rows, context), target.states(batch, rows)] if batch else []
        if chunk.rows:  # prompts record no states for rejected drafts
            works += [target.prompt_attention(chunk.rows, chunk.context), target.states(1, 1)]
        fuses = tokens <= FUSED_SUM_ROWS and tokens * self._hidden * target.itemsize <= FUSED_SUM_BYTES
        launches = target_launches(target.num_layers, num_routed, self._layout.tp, fuses=fuses)
        launches += _unfused_launches_of(target, tokens, self._layout.tp)
        sums = self._all_reduces(2 * target.num_layers + 1, tokens)
        return self._in_sequence(works) + sums + DeviceTime(launches=LAUNCH_S * launches)

    def draft(self, batch: int, rows: float, context: float) -> DeviceTime:
        """Return the time of the drafter's pass over blocks of `rows` rows; 0 without drafts."""
        drafter = self._drafter
        if drafter is None or rows <= 1 or not batch:
            return DeviceTime()
        if self._chain is not None and self._chain_pass is not None:
            # Of several own layers each makes a draft: the first runs one entry, the second two, and so on.
            entries = rows / 2 if self._chain == "mtp" and drafter.num_layers > 1 else 1.0
            return self._draft_one_by_one(self._chain_pass, batch, entries, context).times(rows - 1)
        tokens, chosen = batch * rows, batch * (rows - 1)
        works = [
            drafter.linears(tokens),
            _dequantization(drafter, tokens),
            self._draft_head.head(chosen),
            drafter.attention(batch, rows, context),
        ]
        launches, sums = LAUNCHES_PER_LAYER * drafter.num_layers, DeviceTime()
        launches += _unfused_launches_of(drafter, tokens)
        if self._layout.tp > 1 and not self._layout.has_drafter_gpu:
            launches += LAUNCHES_OF_DRAFTS_OVER_RANKS
            sums = self._all_reduces(2, tokens)  # embedding and argmax
        return self._in_sequence(works) + sums + DeviceTime(launches=LAUNCH_S * launches)

    def _draft_one_by_one(
        self, drafter: ModelShape, batch: int, entries: float, context: float
    ) -> DeviceTime:
        """Return the time of the pass for one draft of each request, of `entries` rows of each."""
        rows, is_divided = batch * entries, self._chain in ("mtp", "assistant")
        works = [drafter.linears(rows), self._draft_head.head(batch)]
        works += [drafter.attention(batch, entries, context), _dequantization(drafter, rows)]
        launches, sums = LAUNCHES_PER_LAYER * drafter.num_layers + LAUNCHES_OF_DRAFT, DeviceTime()
        launches += _unfused_launches_of(drafter, rows, self._layout.tp if is_divided else 1)
        if is_divided:
            works += [drafter.fc(rows), drafter.experts(rows)]
            launches += LAUNCHES_OF_EXPERTS * sum(times for _, times in drafter.routed)
            if self._layout.tp > 1:
                launches += LAUNCHES_OF_DRAFTS_OVER_RANKS
                sums = self._all_reduces(2 * drafter.num_layers + 2, rows)  # with embedding and argmax
        return self._in_sequence(works) + sums + DeviceTime(launches=LAUNCH_S * launches)

    def inject(self, rows: float) -> DeviceTime:
        """Return the time to write `rows` rows of the drafter's context."""
        if self._drafter is None or not rows or self._chain == "assistant":
            return DeviceTime()
        return self._in_sequence([self._drafter.context(rows)])

    def transfer(self, rows: float, nodes: float = 0.0) -> DeviceTime:
        """Return the time to send features of `rows` rows to a separate drafter, and its drafts back.

        Args:
            nodes: of trees; the bytes of chains are not counted.
        """
        if not self._layout.has_drafter_gpu or not rows:
            return DeviceTime()
        link, size = self._gpu.link, self._target.itemsize
        sent_s = link.send_s(rows * self._hidden * size) + link.send_s(nodes * TREE_NODE_BYTES)
        return DeviceTime(link=sent_s)

    def shaping(self) -> DeviceTime:
        """Return the additional time of a step in which drafts branch."""
        return DeviceTime(launches=LAUNCH_S * LAUNCHES_OF_TREES)

    def round(
        self,
        batch: int,
        rows: float,
        context: float,
        chunk: Chunk = NO_CHUNK,
        block_rows: float | None = None,
    ) -> DeviceTime:
        """Return the time in which each request advances by a block, and prompts by a chunk.

        Args:
            rows: verified rows of a request.
            block_rows: rows of its block, if its drafts branch.
        """
        verify, draft, sent = self._parts(batch, rows, context, chunk, block_rows)
        total = verify + draft + sent
        if self._layout.placement == "shared":
            return total + DeviceTime(queue=_waiting_s(draft.total_s, total.total_s, self._layout.replicas))
        if self._layout.placement == "split" and batch > 1 and rows > 1 and not chunk.rows:
            # One half is drafted while the other half is verified.
            verify, draft, sent = self._parts(-(-batch // 2), rows, context, chunk, block_rows)
            longer = max(verify + sent, draft + sent, key=lambda time: time.total_s)
            return min(total, longer + longer, key=lambda time: time.total_s)
        return total

    def _parts(
        self, batch: int, rows: float, context: float, chunk: Chunk, block_rows: float | None
    ) -> tuple[DeviceTime, DeviceTime, DeviceTime]:
        """Return the times of verification, of drafting with the context before it, and of the link."""
        verify, nodes = self.verify(batch, rows, context, chunk), 0.0
        drafted = kept = rows
        if block_rows is not None and rows > 1:
            verify += self.shaping()
            # At most the rows of a path are kept.
            drafted, kept, nodes = block_rows, min(rows, block_rows), batch * (rows - 1)
        tokens = (batch * kept if rows > 1 else 0) + chunk.rows
        draft = self.draft(batch, drafted, context) + self.inject(tokens)
        return verify, draft, self.transfer(tokens, nodes)

    def _in_sequence(self, works: Sequence[DeviceWork]) -> DeviceTime:
        device, total = self._gpu.device, DeviceTime()
        for work in works:
            seconds, issue_s = device.seconds(work), self._gpu.issue_s(work.issued)
            if issue_s > seconds:
                total += DeviceTime(instructions=issue_s)
            elif work.num_bytes / device.bytes_per_s >= work.flop / device.flops:
                total += DeviceTime(bytes=seconds)
            else:
                total += DeviceTime(arithmetic=seconds)
        return total

    def _all_reduces(self, count: int, rows: float) -> DeviceTime:
        num_bytes = rows * self._hidden * self._target.itemsize
        return DeviceTime(link=count * self._gpu.link.all_reduce_s(self._layout.tp, num_bytes))


def target_launches(num_layers: int, num_routed: int, tp: int, *, fuses: bool) -> int:
    """Return the launches of the target's pass and around it; `num_routed` of its layers have experts.

    Sums over ranks are none, as the link's latency includes them; if `fuses`, nor are the norms after them.
    """
    count = LAUNCHES_PER_LAYER * num_layers + LAUNCHES_OF_EXPERTS * num_routed + LAUNCHES_AROUND
    if tp > 1:
        count += LAUNCHES_OF_SUMS * (num_layers - num_routed) + LAUNCHES_OVER_RANKS
        count -= LAUNCHES_OF_SUMS * num_layers * fuses
    return count


def unfused_launches(num_layers: int, num_routed: int, tp: int, *, has_codes: bool = False) -> int:
    """Return the launches that a pass has in addition if its rows are too many for our products."""
    num_dense = num_layers - num_routed
    count = num_dense * (LAUNCHES_UNFUSED if tp == 1 else LAUNCHES_UNFUSED_OVER_RANKS)
    if has_codes:
        count += PRODUCTS_PER_LAYER * num_dense + PRODUCTS_BESIDE_EXPERTS * num_routed
    return count


def _unfused_launches_of(model: ModelShape, rows: float, tp: int = 1) -> int:
    if rows <= model.max_own_rows:
        return 0
    num_routed, has_codes = sum(times for _, times in model.routed), model.weight_bytes < model.itemsize
    return unfused_launches(model.num_layers, num_routed, tp, has_codes=has_codes)


def _dequantization(model: ModelShape, rows: float) -> DeviceWork:
    """Return the work of writing weights of codes in 16 bits, if rows are too many for our products.

    Weights of which some are codes count as if all were.
    """
    if rows <= model.max_own_rows or model.weight_bytes >= model.itemsize:
        return DeviceWork(0.0, 0.0)
    return DeviceWork(model.linear_params * (model.weight_bytes + model.itemsize), 0.0)


def _waiting_s(service_s: float, round_s: float, engines: int) -> float:
    """Return the seconds per round that one of `engines` engines waits for their shared drafter.

    Mean value analysis of a closed queueing network (Reiser and Lavenberg, 1980). It assumes exponential
    service times, so it overestimates for engines with equal load.
    """
    think_s, queue_length, response_s = round_s - service_s, 0.0, service_s
    for count in range(1, engines + 1):
        response_s = service_s * (1.0 + queue_length)
        queue_length = count * response_s / (think_s + response_s)
    return response_s - service_s
