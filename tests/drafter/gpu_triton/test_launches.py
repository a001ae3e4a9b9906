"""The number of kernels that a decoding step's passes launch (device: see `devices.py`).

A launch costs a GPU about a microsecond whatever it computes, and a pass of few rows has hundreds. Counted
are Triton's kernels and PyTorch's operators that would launch one; views and allocations are none.

Legend: N rows, H hidden, m taps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.tensor_parallel import Sharding, SingleRank
from manta.actors.targets.model.weights import TargetWeights
from manta.actors.targets.runners.drafts.tp_sampling import best_of_ranks, surest_of_ranks
from manta.cluster.hardware.kernel_loops import EXPERT_TILES, OWN_ROWS, PACKED_ROWS, PRODUCT_TILES
from manta.cluster.hardware.layer_shape import ExpertShape
from manta.cluster.hardware.step_time import (
    LAUNCHES_AROUND,
    LAUNCHES_OF_DRAFTS_OVER_RANKS,
    LAUNCHES_OF_TREES,
    target_launches,
    unfused_launches,
)
from manta.cluster.step.scheduler_output import TreeShape
from manta.drafter.compute.backend import Backend, PlacedRows
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.gpu_triton.linear.gemm_tiles import MAX_OWN_ROWS, MAX_PACKED_ROWS, ROW_TILES
from manta.drafter.compute.gpu_triton.moe.moe import TritonExperts
from manta.drafter.compute.layers.moe import ExpertWeights
from manta.drafter.compute.memory.peer_buffers import PeerBuffers
from manta.drafter.dflash.checkpoint import load_drafter
from manta.drafter.dflash.model import DFlashDrafter
from manta.drafter.dflash.target_features import TargetFacts
from support.engines.devices import DEVICE, ON_GPU, watch_launches
from support.engines.steps import GREEDY, Steps, open_runner, short_warm_up
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytestmark = pytest.mark.usefixtures("on_the_device")
ROWS, PAGE_SIZE = 16, 16
TALL = OWN_ROWS + 1  # rows that our products do not take
ATOL = 1e-4 if ON_GPU else 1e-5  # a GPU's products of fp32 are three of tf32
T = TypeVar("T")
NO_LAUNCH = ("view", "empty", "slice", "select.", "expand", "permute", "transpose", "squeeze", "alias")
NO_LAUNCH += ("unbind", "detach", "as_strided", "split", "lift_fresh")
EMBEDDING_OVER_RANKS = ("sub.Tensor", "lt.Scalar", "ge.Scalar", "bitwise_or.Tensor", "masked_fill_.Scalar")


class Launches(TorchDispatchMode):
    """Counts launches by name inside the context; the interpreter's own PyTorch calls are excluded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._inside = False
        watch_launches(monkeypatch, self._count)

    def _count(self, kernel: str, _: object, launch: Callable[[], object]) -> object:
        self.counts[kernel] += 1
        self._inside = True
        try:
            return launch()
        finally:
            self._inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if not self._inside and name != "t" and not any(part in name for part in NO_LAUNCH):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def of(self, call: Callable[[], T]) -> tuple[T, Counter[str]]:
        """Return a call's result and launches."""
        self.counts.clear()
        with self:
            found = call()
        return found, Counter(self.counts)


def load(target: Path, drafter: Path, backend: Backend) -> tuple[Decoder, DFlashDrafter]:
    spec = read_model(target)
    weights = TargetWeights(target, spec, Sharding(spec, 0, 1), torch.float32, DEVICE)
    decoder = Decoder(weights, (0, 1, 2), 64, SingleRank(), backend)
    facts = TargetFacts(spec.hidden_size, spec.num_layers, spec.vocab_size, 64)
    return decoder, load_drafter(drafter, facts, decoder.shared_embeddings, torch.float32, DEVICE, backend)


def rows(backend: Backend, count: int = ROWS) -> PlacedRows:
    """Return the first rows of the first request, in the first pages."""
    pages = np.arange(-(-count // PAGE_SIZE), dtype=np.int32)[None]
    batch = backend.attention_batch(np.zeros(1, np.int32), np.full(1, count), pages, PAGE_SIZE, DEVICE)
    return PlacedRows(torch.arange(count), (torch.arange(count),), (batch,))


@dataclass
class Passes:
    """The results of a step's passes over a block's rows, and what each launches."""

    results: list[Tensor]
    launches: list[Counter[str]]
    layers: tuple[int, int]


@torch.no_grad()  # in inference mode operators are not decomposed
def run(target_folder: Path, drafter_folder: Path, backend: Backend, launches: Launches) -> Passes:
    """Verify, head, inject, draft, each once."""
    target, drafter = load(target_folder, drafter_folder, backend)
    token_ids_N, placed = torch.arange(ROWS), rows(backend)
    cache, draft_cache = target.new_cache(1, PAGE_SIZE), drafter.new_cache(1, PAGE_SIZE)
    (hidden_NH, taps_NmH), verify = launches.of(lambda: target.forward(token_ids_N, placed, cache))
    logits_NV, head = launches.of(lambda: target.logits(hidden_NH))
    assert taps_NmH is not None

    def inject() -> None:
        drafter.write_context(drafter.context_features(taps_NmH), placed, draft_cache)

    _, context = launches.of(inject)
    kv = draft_cache.kv.clone()
    block_NH, draft = launches.of(
        lambda: drafter.forward(drafter.embed_block(token_ids_N), placed, draft_cache)
    )
    results = [hidden_NH, taps_NmH, logits_NV, kv, block_NH]
    return Passes(
        results, [verify, head, context, draft], (target.spec.num_layers, drafter.config.num_layers)
    )


def test_a_steps_fused_passes_take_six_launches_per_layer_and_few_more(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    """Qwen3-8B and its drafter of 5 layers take 6 * (36 + 5) + 15 = 261; results equal PyTorch's."""
    launches = Launches(monkeypatch)
    ours = run(tiny_qwen3, tiny_drafter, TritonBackend(DEVICE, batch_invariant=True), launches)
    theirs = run(tiny_qwen3, tiny_drafter, EagerBackend(), launches)
    for result, expected in zip(ours.results, theirs.results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=ATOL)

    def per_layer(layers: int) -> dict[str, int]:
        return {"_multiply": 4 * layers, "_norm_rotate_write": layers, "_attend": layers}

    verify, head, context, draft = ours.launches
    besides = {"_rms_norm": 2, "_list_work": 1, "index_select": 1}  # the first norm and the last; embeddings
    assert verify == per_layer(ours.layers[0]) | besides | {"stack": 1}  # of taps
    assert draft == per_layer(ours.layers[1]) | besides
    assert head == {"_multiply": 1}
    assert context == {"_multiply": 2, "_rms_norm": 1, "_write_context": 1}
    fixed = [verify - Counter(per_layer(ours.layers[0])), draft - Counter(per_layer(ours.layers[1]))]
    assert 6 * (36 + 5) + sum(part.total() for part in (*fixed, head, head, context)) == 261


class EqualRanks(SingleRank):
    """Rank 0 of several with equal tensors. Collectives are no launches here: their seconds include them."""

    def __init__(self, world_size: int, *, fuses: bool = True) -> None:
        """With `fuses` sums are made with the norms after them, here over one rank's memory."""
        self.world_size = world_size
        if world_size > 1 and fuses:
            width = 256
            values, flags = torch.zeros(2 * TALL * width, device=DEVICE), torch.zeros(TALL, dtype=torch.int32)
            self._memory = values, flags.to(DEVICE)
            addresses = [torch.tensor([each.data_ptr()], device=DEVICE) for each in self._memory]
            turns = torch.zeros(TALL, dtype=torch.int32, device=DEVICE)
            self.peer_buffers = PeerBuffers(0, 1, torch.float32, *addresses, turns, width, TALL * width)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        with _disable_current_modes():
            return torch.cat([tensor] * self.world_size, dim=dim)


@pytest.mark.one_in(3)
@torch.no_grad()
@pytest.mark.parametrize("count", [ROWS, TALL])
@pytest.mark.parametrize(("tp", "fuses"), [(1, True), (8, False), (8, True)])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_the_planner_charges_the_launches_of_a_targets_pass(
    family: str, tp: int, fuses: bool, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of layers with experts and without, on one rank and on eight, for any number of layers.

    More rows than our products take are PyTorch's, which fuse nothing.

    gpt-oss-120b's pass on eight ranks has 398 launches with those around it, and 470 if its rows are too many
    for sums that are made with the norms after them. A sum that is fused is no launch besides: its seconds
    are those of a collective.
    """
    from support.checkpoints.tiny import make_tiny_target

    folder = make_tiny_target(tmp_path / family, family, num_attention_heads=8, num_key_value_heads=8)
    spec, ranks = read_model(folder), EqualRanks(tp, fuses=fuses)
    backend = TritonBackend(DEVICE, batch_invariant=count == ROWS)  # on a CPU other products are PyTorch's
    weights = TargetWeights(folder, spec, Sharding(spec, 0, tp), torch.float32, DEVICE)
    target, launches = Decoder(weights, (), 2 * TALL, ranks, backend), Launches(monkeypatch)
    token_ids_N, placed = torch.arange(count) % spec.vocab_size, rows(backend, count)
    cache = target.new_cache(-(-TALL // PAGE_SIZE), PAGE_SIZE)
    (hidden_NH, _), verify = launches.of(lambda: target.forward(token_ids_N, placed, cache))
    (logits_NU, _), head = launches.of(lambda: target.local_logits(hidden_NH))
    ids_N, scores_N = logits_NU.argmax(1), logits_NU.amax(1)
    fused = 2 * spec.num_layers if tp > 1 and fuses else 0
    assert verify.pop("_sum_add_norm", 0) == fused
    found = verify.total() + head.total()
    if tp > 1:
        _, choice = launches.of(lambda: best_of_ranks(ids_N, scores_N, ranks))
        found += choice.total()
        _, drafts = launches.of(lambda: surest_of_ranks(ids_N, scores_N, scores_N - 1, ranks))
        embedding = sum(verify[name] for name in EMBEDDING_OVER_RANKS)
        assert drafts.total() + embedding == LAUNCHES_OF_DRAFTS_OVER_RANKS
    num_layers, num_routed = spec.num_layers, target.num_routed
    planned = target_launches(num_layers, num_routed, tp, fuses=fuses) - LAUNCHES_AROUND
    planned += unfused_launches(num_layers, num_routed, tp) if count > OWN_ROWS else 0
    one_rank = Counter({"_rms_norm": 2, "_list_work": 1, "index_select": 1, "head": 1})
    assert planned + one_rank.total() - found in (0, 1), "a last norm may be its layer's"
    assert target_launches(36, 36, 8, fuses=False) == 470
    assert target_launches(36, 36, 8, fuses=True) == 398


def test_the_planner_knows_how_many_rows_our_products_take() -> None:
    assert (MAX_OWN_ROWS, MAX_PACKED_ROWS) == (OWN_ROWS, PACKED_ROWS)
    assert ROW_TILES == PRODUCT_TILES
    assert target_launches(36, 0, 1, fuses=True) + unfused_launches(36, 0, 1) == 9 * 36 + LAUNCHES_AROUND


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_planner_knows_how_many_rows_tiles_of_experts_have(ranks: int) -> None:
    """Also of a rank that has some of the experts, whose pairs are fewer than those of a pass."""
    held = 128 // ranks
    shape = ExpertShape(count=128, chosen=4, inter=1, num_held=held, num_ranks=ranks)
    weights = ExpertWeights(gate_up=torch.empty(held, 2, 1), down=torch.empty(held, 1, 1), num_ranks=ranks)
    experts = TritonExperts(weights, torch.zeros(1, dtype=torch.int32))
    of_rows = [shape.tile_rows(rows) for rows in range(1, 2048)]
    assert of_rows == [experts.tile_height(4 * rows, torch.bfloat16) for rows in range(1, 2048)]
    assert set(of_rows) == set(EXPERT_TILES) and (of_rows[255], of_rows[256]) == (16, 32)


def test_the_planner_knows_how_many_launches_trees_take(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than chains in a step of both passes; attention over trees takes as many."""
    launches, found, views = Launches(monkeypatch), list[Counter[str]](), ("flatten", "atleast")
    place = {"device": DEVICE.type, "page_size": PAGE_SIZE, "num_pages": 16, "max_model_len": 48}
    for tree in ({}, {"tree_width": 2, "tree_size": 6}):
        spec = {"model": str(tiny_drafter), "num_speculative_tokens": 3, "adaptive": False, **tree}
        with short_warm_up():
            runner, _ = open_runner(tiny_qwen3, speculative_config=spec, attention_backend="triton", **place)
        steps, drafts = Steps(1, 48), 6 if tree else 3
        runner.execute(steps.plan([0], [0], [3], [0], admitted=[steps.admit(0, [5, 6, 7], GREEDY)]))
        plan = steps.plan([0], [3], [1 + drafts], [drafts])
        shape = TreeShape(3, 2, (1.0, 1.0)) if tree else None
        _, counts = launches.of(partial(runner.submit, replace(plan, tree=shape)))
        assert bool(tree) == (runner.collect().trees is not None)
        found.append(Counter({name: n for name, n in counts.items() if not name.startswith(views)}))
    chains, trees = found
    assert trees.total() - chains.total() == LAUNCHES_OF_TREES, (trees - chains, chains - trees)
