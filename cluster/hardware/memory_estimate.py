"""Estimates a layout's memory: weights, the peak of a step, and the rest for K/V pages and recurrent states.

The engine measures the peak of a step at start (`actors/targets/loading/warmup.py`); here it is an estimate.
Pages are counted as the engine does (`kv_cache_groups.py`), so layers with a sliding window count their
window only. Each request has two recurrent states, one of which is a saved one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import PlacementError
from ..pages.kv_cache_groups import KVCacheLayout, LayerPlace, plan_kv_cache, plane_width
from .gpu_specs import GIB, Gpu
from .model_pair import LayoutDemand, ModelPair
from .model_shape import ModelShape
from .parallel_layouts import ParallelLayout

GPU_MEMORY_UTILIZATION = 0.9  # share of a GPU's memory that is used: `gpu_memory_utilization`
PAGE_SIZE = 64  # the engine's page size on a GPU
MAX_NUM_SEQS = 256  # each one costs a slot and CUDA graphs
MAX_ROWS = 8192  # rows of a step: `max_num_batched_tokens`
STATES_PER_REQUEST = 2
# Estimates. PROCESS_BYTES: CUDA context, libraries, NCCL, graphs, attention workspace. HIDDEN_COPIES and
# INNER_COPIES: a layer's and its MLP's activations per row of a step. LOGIT_COPIES: logits of target and
# drafter per row that samples a token; on a drafter's own GPU, of a pass and of its CUDA graphs.
PROCESS_BYTES = 2 * GIB
HIDDEN_COPIES, INNER_COPIES, LOGIT_COPIES = 8, 3, 2


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of one engine.

    Attributes:
        weights_bytes: weights on each GPU of the target.
        kv_bytes: memory for K/V pages there, less if the drafter's GPU is the tighter limit.
        kv_tokens: tokens that these pages hold, in sequences of the demand's context.
        largest_batch: number of such sequences that fit into memory at once.
        state_bytes: recurrent states of a request on a GPU of the target, with saved ones; 0 without any.
    """

    weights_bytes: int
    kv_bytes: int
    kv_tokens: int
    largest_batch: int
    state_bytes: int = 0

    @property
    def max_num_seqs(self) -> int:
        return max(1, min(self.largest_batch, MAX_NUM_SEQS))

    @property
    def num_states(self) -> int | None:
        return STATES_PER_REQUEST * self.max_num_seqs if self.state_bytes else None


def estimate_memory(
    pair: ModelPair, gpu: Gpu, layout: ParallelLayout, demand: LayoutDemand
) -> MemoryEstimate:
    """Return the memory of an engine; PlacementError if not even one sequence of max_model_len fits."""
    budget = int(gpu.memory_bytes * GPU_MEMORY_UTILIZATION)
    weights, target_free = _target_gpu(pair, layout, budget)
    if target_free <= 0:
        raise _too_large(pair, gpu, layout, budget - target_free)
    pages, states = kv_cache_layout(pair, layout, demand.max_model_len), _state_bytes(pair, layout)
    target_gpu = _PageMemory(target_free, page_bytes(pair, layout, pages, target=True), states)
    gpus = [target_gpu]
    if layout.has_drafter_gpu:
        free = _drafter_gpu(pair, layout, budget)
        if free <= 0:
            raise PlacementError(
                f"{layout}: {-free / GIB:.1f} GiB are missing on the drafter's GPU for its weights and "
                "the target's embedding and head. Colocate the drafter, or take a larger GPU.",
                param="gpu",
            )
        gpus.append(_PageMemory(free, page_bytes(pair, layout, pages, target=False), 0))
    for gpu_memory in gpus:
        for_pages = gpu_memory.free_bytes - gpu_memory.state_bytes
        if _sequence_bytes(pages, gpu_memory.page_bytes, demand.max_model_len) > for_pages:
            raise _too_long(pages, gpu_memory.page_bytes, for_pages, layout, demand)
    largest = min(each.num_sequences(pages, demand.context) for each in gpus)
    kv_bytes = target_free - int(min(largest, MAX_NUM_SEQS)) * states
    per_sequence = _sequence_bytes(pages, target_gpu.page_bytes, demand.context)
    if layout.has_drafter_gpu:  # which may hold fewer sequences than the target's GPU
        kv_bytes = min(kv_bytes, int(largest * per_sequence))
    return MemoryEstimate(
        weights, kv_bytes, int(kv_bytes / per_sequence * demand.context), int(largest), states
    )


class _PageMemory(NamedTuple):
    """What a GPU has for sequences, and what they take of it.

    Attributes:
        free_bytes: for pages and recurrent states of all sequences.
        page_bytes: of a page of each pool.
        state_bytes: recurrent states of a sequence.
    """

    free_bytes: int
    page_bytes: tuple[int, ...]
    state_bytes: int

    def num_sequences(self, pages: KVCacheLayout, context: int) -> float:
        """Return how many sequences of `context` tokens fit; inf if they take nothing here."""
        each = _sequence_bytes(pages, self.page_bytes, context) + self.state_bytes
        return self.free_bytes // each if each else float("inf")


def _target_gpu(pair: ModelPair, layout: ParallelLayout, given: int) -> tuple[int, int]:
    """Return the weight bytes on a GPU of the target, and what is left of `given` for pages."""
    weights = pair.target_bytes(layout.tp)
    rank = pair.target.rank(layout.tp)
    if layout.placement is not None:
        weights += pair.fc_bytes  # the drafter's context is projected on the target's GPU
    if layout.placement == "colocated":
        weights += pair.drafter_bytes(layout.tp)
    return weights, given - weights - _step_bytes(rank, pair.num_drafts if layout.placement else 0)


def _drafter_gpu(pair: ModelPair, layout: ParallelLayout, given: int) -> int:
    """Return the bytes for pages on a drafter's own GPU, which also has the target's vocabulary."""
    assert pair.drafter is not None, "only a pair with a drafter is laid out with one"
    vocab_bytes = pair.num_vocab_matrices * pair.target.head_params * pair.target.itemsize
    step_bytes = layout.drafted_engines * (_step_bytes(pair.drafter, pair.num_drafts) - PROCESS_BYTES)
    return given - pair.drafter_bytes() - vocab_bytes - PROCESS_BYTES - step_bytes


def _step_bytes(rank: ModelShape, num_drafts: int) -> int:
    sampled = min(MAX_NUM_SEQS * (1 + num_drafts), MAX_ROWS)
    sizes = {"hidden": rank.hidden, "inter": rank.widest_inter, "vocab": rank.vocab}
    return PROCESS_BYTES + activation_bytes(MAX_ROWS, sampled, **sizes, itemsize=rank.itemsize)


def activation_bytes(rows: int, sampled: int, *, hidden: int, inter: int, vocab: int, itemsize: int) -> int:
    """Return the estimated bytes of a step of `rows` rows, of which `sampled` have logits."""
    states = rows * (HIDDEN_COPIES * hidden + INNER_COPIES * inter)
    return (states + LOGIT_COPIES * sampled * vocab) * itemsize


def _state_bytes(pair: ModelPair, layout: ParallelLayout) -> int:
    """Return the bytes of a request's states on a GPU of the target, including the records of its drafts."""
    drafts = pair.num_drafts if layout.placement else 0
    return STATES_PER_REQUEST * round(pair.target.rank(layout.tp).state_bytes(drafts))


def kv_cache_layout(pair: ModelPair, layout: ParallelLayout, max_model_len: int) -> KVCacheLayout:
    drafter = pair.drafter if layout.placement else None
    windows = () if drafter is None else drafter.windows
    target = pair.target.rank(layout.tp)
    pages = plan_kv_cache(target.windows, windows, max_model_len, target.kv_geometries)
    return replace(pages, drafter=tuple(pages.target[i] for i in pair.read_layers) or pages.drafter)


def page_bytes(
    pair: ModelPair, layout: ParallelLayout, pages: KVCacheLayout, *, target: bool
) -> tuple[int, ...]:
    """Return the bytes of a page of each pool, on a GPU of the target or on the drafter's own."""
    sizes = [0] * pages.num_pools
    models: list[tuple[ModelShape, tuple[LayerPlace, ...], int]] = []
    if target:
        models.append((pair.target.rank(layout.tp), pages.target, 1))
    drafter = pair.drafter_rank(layout.tp)
    if drafter is not None and (layout.placement == "colocated" or (layout.has_drafter_gpu and not target)):
        if not pair.read_layers:
            models.append((drafter, pages.drafter, layout.drafted_engines))
        sizes[pages.groups[pages.drafter[0].group].pool] += pair.state_bytes
    for model, places, times in models:
        per_plane = PAGE_SIZE * plane_width(places, model.kv_geometries) * model.kv_element_bytes
        for pool in range(pages.num_pools):
            sizes[pool] += times * pages.num_planes(places, pool) * per_plane
    return tuple(sizes)


def _sequence_bytes(pages: KVCacheLayout, sizes: tuple[int, ...], num_tokens: int) -> int:
    in_use = pages.pages_per_sequence(num_tokens, PAGE_SIZE, MAX_ROWS)
    return sum(count * size for count, size in zip(in_use, sizes, strict=True))


def _too_large(pair: ModelPair, gpu: Gpu, layout: ParallelLayout, needed: int) -> PlacementError:
    given = gpu.memory_bytes * GPU_MEMORY_UTILIZATION
    larger = [tp for tp in pair.tp_sizes if tp > layout.tp]
    remedy = f"shard it over {larger[0]} GPUs" if larger else "take a larger GPU or a smaller model"
    return PlacementError(
        f"{layout}: weights and steps need {needed / GIB:.1f} GiB on each {gpu.name}, which gives "
        f"{given / GIB:.1f} GiB ({GPU_MEMORY_UTILIZATION:g} of its memory): "
        f"{(needed - given) / GIB:.1f} GiB are missing. To serve it, {remedy}.",
        param="gpus" if larger else "gpu",
    )


def _too_long(
    pages: KVCacheLayout, sizes: tuple[int, ...], free: int, layout: ParallelLayout, demand: LayoutDemand
) -> PlacementError:
    needed = _sequence_bytes(pages, sizes, demand.max_model_len)
    lengths = range(1, demand.max_model_len + 1)
    fits = bisect_right(lengths, free, key=lambda length: _sequence_bytes(pages, sizes, length))
    return PlacementError(
        f"{layout}: one sequence of max_model_len={demand.max_model_len} needs {needed / GIB:.1f} GiB of K/V "
        f"pages, and {free / GIB:.1f} GiB are left: {(needed - free) / GIB:.1f} GiB are missing. Set "
        f"--max-model-len to at most {fits}, or use more GPUs.",
        param="max_model_len",
    )
