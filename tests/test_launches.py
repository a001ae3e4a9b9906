"""How many kernels the passes of a decoding step launch; where, says `devices.py`.

A launch costs a GPU about a microsecond whatever it computes, and a pass of few rows has hundreds. Counted
are Triton's kernels and PyTorch's operators that would launch one; views and allocations are none.

Legend: N rows, H hidden, m taps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from devices import DEVICE, ON_GPU, watch_launches
from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.parallel import Sharding, SingleRank
from manta.actors.targets.model.weights import TargetWeights
from manta.drafter.compute.backend import Backend, PlacedRows
from manta.drafter.compute.eager.backend import TorchBackend
from manta.drafter.compute.gpu.backend import TritonBackend
from manta.drafter.dflash.checkpoint import load_drafter
from manta.drafter.dflash.features import TargetFacts
from manta.drafter.dflash.model import DFlashDrafter
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("on_the_device")
ROWS, PAGE_SIZE = 16, 16
OURS = TritonBackend(DEVICE, batch_invariant=True)  # whose products are ours in the interpreter, too
ATOL = 1e-4 if ON_GPU else 1e-5  # a GPU's products of fp32 are three of tf32
NO_LAUNCH = ("view", "empty", "slice", "select.", "expand", "permute", "transpose", "squeeze", "alias")
NO_LAUNCH += ("unbind", "detach", "as_strided", "split", "lift_fresh")


class Launches(TorchDispatchMode):
    """Counts by name while it is entered; the interpreter's own PyTorch is none of it."""

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
        if not self._inside and not any(part in name for part in NO_LAUNCH):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def of(self, call: Callable[[], object]) -> Counter[str]:
        self.counts.clear()
        with self:
            call()
        return Counter(self.counts)


def load(target: Path, drafter: Path, backend: Backend) -> tuple[Decoder, DFlashDrafter]:
    spec = read_model(target)
    weights = TargetWeights(target, spec, Sharding(spec, 0, 1), torch.float32, DEVICE)
    decoder = Decoder(weights, (0, 1, 2), 64, SingleRank(), backend)
    facts = TargetFacts(spec.hidden_size, spec.num_layers, spec.vocab_size, 64)
    return decoder, load_drafter(drafter, facts, decoder, torch.float32, DEVICE, backend)


def rows(backend: Backend) -> PlacedRows:
    """A block of the first request, in the first page."""
    places = np.zeros(1, np.int32), np.full(1, ROWS), np.zeros((1, 1), np.int32)
    batch = backend.attention_batch(*places, PAGE_SIZE, DEVICE)
    return PlacedRows(torch.arange(ROWS), (torch.arange(ROWS),), (batch,))


@torch.no_grad()  # in inference mode operators come uncut
def test_fused_passes_are_those_of_pytorch(tiny_qwen3: Path, tiny_drafter: Path):
    found = []
    for backend in (OURS, TorchBackend()):
        target, drafter = load(tiny_qwen3, tiny_drafter, backend)
        placed, cache = rows(backend), drafter.new_cache(1, PAGE_SIZE)
        hidden_NH, taps_NmH = target.forward(torch.arange(ROWS), placed, target.new_cache(1, PAGE_SIZE))
        assert taps_NmH is not None
        drafter.write_context(drafter.context_features(taps_NmH), placed, cache)
        context = cache.kv.clone()
        block_NH = drafter.forward(drafter.embed_block(torch.arange(ROWS)), placed, cache)
        found.append((hidden_NH, taps_NmH, target.logits(hidden_NH), context, block_NH))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=ATOL)


@torch.no_grad()  # in inference mode operators come uncut
def test_a_step_s_passes_take_six_launches_per_layer_and_few_besides(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    """Qwen3-8B and its drafter of 5 layers: 6 * (36 + 5) + 15 = 261, where it was 10 * (36 + 5) + 13."""
    target, drafter = load(tiny_qwen3, tiny_drafter, OURS)
    launches, token_ids_N, placed = Launches(monkeypatch), torch.arange(ROWS), rows(OURS)
    cache, draft_cache = target.new_cache(1, PAGE_SIZE), drafter.new_cache(1, PAGE_SIZE)
    hidden_NH, taps_NmH = target.forward(token_ids_N, placed, cache)
    assert taps_NmH is not None
    verify = launches.of(lambda: target.forward(token_ids_N, placed, cache))
    layers = target.spec.num_layers
    # The norms of the embedding and of the last layer; where attention's work is; taps.
    besides = {"_rms_norm": 2, "_list_work": 1, "index_select": 1, "stack": 1}
    assert verify == {"_multiply": 4 * layers, "_norm_rotate_write": layers, "_attend": layers} | besides
    head = launches.of(lambda: target.logits(hidden_NH))
    assert head == {"_multiply": 1}

    def inject() -> None:
        drafter.write_context(drafter.context_features(taps_NmH), placed, draft_cache)

    context = launches.of(inject)
    assert context == {"_multiply": 2, "_rms_norm": 1, "_write_context": 1}
    draft = launches.of(lambda: drafter.forward(drafter.embed_block(token_ids_N), placed, draft_cache))
    layers = drafter.config.num_layers
    besides = {"_rms_norm": 2, "_list_work": 1, "index_select": 1}
    assert draft == {"_multiply": 4 * layers, "_norm_rotate_write": layers, "_attend": layers} | besides
    fixed = [5, 4, *(sum(part.values()) for part in (head, head, context))]
    assert 6 * (36 + 5) + sum(fixed) == 261
