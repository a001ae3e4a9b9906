"""The gated delta rule equals transformers' on every backend; its bits do not depend on how rows are cut.

Slots here are a memory's, rows those of a layer's product.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.eager.delta_rule import chunk, fold, unit
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.layers.gated_delta_net import DeltaNetShape
from manta.drafter.compute.memory.recurrent_state_cache import Save, StateMemory
from manta.jobs.doctor.cases.delta_rule import DeltaLayer
from support.engines.devices import DEVICE, HALVES
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

# Heads of no round size; then a key head of Qwen3.5-9B and 35B-A3B, and of 27B with fewer columns.
KIND = RecurrentStateSpec(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=12, taps=4)
SMALL = RecurrentStateSpec(num_key_heads=1, num_value_heads=1, key_dim=8, value_dim=4, taps=4)
TWO, THREE = RecurrentStateSpec(1, 2, 128, 128, 4), RecurrentStateSpec(1, 3, 128, 16, 4)
NUM_SLOTS, MAX_DRAFTS, LAYER = 5, 5, 1
BACKENDS: dict[str, Callable[[], Backend]] = {
    "eager": EagerBackend,
    "loops": NumbaBackend,
    "triton": lambda: TritonBackend(DEVICE),
    "triton, batch-invariant": lambda: TritonBackend(DEVICE, batch_invariant=True),
}


def dice(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(count: int, seed: int = 0, kind: RecurrentStateSpec = KIND) -> Tensor:
    return dice(count, kind.channels + kind.num_value_heads * (kind.value_dim + 2), seed=seed)


def operands(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k = (unit(dice(count, 2, 8, seed=seed)) for seed in (1, 2))
    v = dice(count, 6, 12, seed=3)
    return q * 8**-0.5, k, v, -dice(count, 6, seed=4).exp(), dice(count, 6, seed=5).sigmoid()


def make_shape(kind: RecurrentStateSpec = KIND, device: torch.device | str = "cpu") -> DeltaNetShape:
    heads, norm_F = kind.num_value_heads, 1.0 + 0.1 * dice(kind.value_dim, seed=7)
    kernel_CT, rate_V = dice(kind.channels, kind.taps, seed=6), -dice(heads, seed=8).exp()
    parts = (part.to(device) for part in (kernel_CT, rate_V, dice(heads, seed=9), norm_F))
    return DeltaNetShape(kind, *parts, 1e-2)


def layer_of(
    backend: Backend, kind: RecurrentStateSpec = KIND, dtype: torch.dtype = torch.float32, padding: int = 0
) -> DeltaLayer:
    """Return a layer, of kernels on their device."""
    device = DEVICE if isinstance(backend, TritonBackend) else torch.device("cpu")
    memory = StateMemory(2, kind, NUM_SLOTS, MAX_DRAFTS, dtype, device)
    return DeltaLayer(backend, make_shape(kind, device), memory, page_size=16, layer=LAYER, padding=padding)


def run_row_by_row(layer: DeltaLayer, slot: int, given: Tensor) -> Tensor:
    return torch.cat([layer.run([(slot, row, 0)]) for row in given.split(1)])


@pytest.fixture
def layer(backend: Backend) -> DeltaLayer:
    return layer_of(backend)


@pytest.mark.parametrize("count", [1, 7, 70])
def test_outputs_and_states_equal_transformers_chunked_rule(count: int) -> None:
    """transformers' chunks are 64 rows of matrix products."""
    q, k, v, g, beta = operands(count)
    state = 0.3 * dice(6, 8, 12, seed=10)
    read, records, behind = chunk(q, k, v, g, beta, state)
    scaled = (x[None] for x in (q * 8**0.5, k, v, g, beta))
    theirs, end = torch_chunk_gated_delta_rule(*scaled, initial_state=state[None], output_final_state=True)
    torch.testing.assert_close(read, theirs[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(behind, end[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fold(state, records, count), end[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("keys", ["any", "equal"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_layer_equals_one_of_transformers_parts(name: str, keys: str) -> None:
    """Equal keys are as of a repeated token: A is nearly all ones below its diagonal."""
    layer, mixed, shape = layer_of(BACKENDS[name]()), rows(50), make_shape()
    if keys == "equal":
        mixed = rows(1).repeat(50, 1) + 0.01 * rows(50, 3)
        mixed[:, -12:-6], mixed[:, -6:] = 4.0, -9.0  # beta near 1, nothing decays
    x, z, b, a = mixed.split([KIND.channels, 72, 6, 6], dim=1)
    y = causal_conv1d_fn(x.T[None], shape.kernel_CT, activation="silu")[0].T
    q, k, v = (
        part.unflatten(1, (-1, size))[None]
        for part, size in zip(y.split([16, 16, 72], 1), (8, 8, 12), strict=True)
    )
    g = shape.rate_V * torch.nn.functional.softplus(a + shape.dt_bias_V)
    read, state = torch_chunk_gated_delta_rule(
        *(q, k, v, g[None], b.sigmoid()[None]), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    norm = Qwen3_5RMSNormGated(12, eps=shape.eps)
    norm.weight.data = shape.norm_F
    expected = norm(read[0], z.unflatten(1, (6, 12))).flatten(1).detach()
    near = {"atol": 1e-4 if name.startswith("triton") else 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(layer.run([(2, mixed, 0)]).cpu(), expected, **near)
    torch.testing.assert_close(layer.memory.states_LZVDF[LAYER, 2].cpu(), state[0], **near)


@pytest.mark.parametrize("stood", range(MAX_DRAFTS + 1))
@pytest.mark.parametrize(
    ("name", "kind"), [("eager", KIND), ("loops", KIND), ("triton, batch-invariant", SMALL)], ids=str
)
def test_rejected_drafts_leave_no_trace_in_any_bit(name: str, kind: RecurrentStateSpec, stood: int) -> None:
    """A prompt, partly accepted drafts, more drafts and the rest equal a pass row by row."""
    layer, given, wrong = layer_of(BACKENDS[name](), kind), rows(24, 0, kind), rows(24, 20, kind)
    expected = run_row_by_row(layer, 0, given)
    reported = [layer.run([(1, given[:9], 0)])]
    drafts = torch.cat((given[9 : 10 + stood], wrong[: MAX_DRAFTS - stood]))
    reported.append(layer.run([(1, drafts, MAX_DRAFTS)])[: 1 + stood])
    layer.accept(1, stood)
    at = 10 + stood
    reported.append(layer.run([(1, torch.cat((given[at : at + 2], wrong[:2])), 3)])[:2])
    layer.accept(1, 1)
    reported.append(layer.run([(1, given[at + 2 :], 0)]))
    assert torch.equal(torch.cat(reported), expected)
    for part in layer.memory.tensors[:2]:
        assert torch.equal(part[LAYER, 0], part[LAYER, 1]) and not part[1 - LAYER].any()


def test_a_saved_state_continues_like_the_original(layer: DeltaLayer) -> None:
    given, other = rows(20), rows(6, seed=21)
    expected = run_row_by_row(layer, 0, given)
    # Two in one pass, with a request that saves nothing; the second after the last known row.
    saves = (Save(1, 4, 2), Save(1, 7, 3))
    layer.run([(0, other, 2), (1, torch.cat((given[:7], other[:3])), 3)], saves)
    for slot, begin in ((2, 4), (3, 7)):
        assert torch.equal(layer.run([(slot, given[begin:], 0)]), expected[begin:])
    assert torch.equal(layer.run([(1, given[7:], 0)]), expected[7:])


def test_a_copy_includes_records(layer: DeltaLayer) -> None:
    given = rows(20)
    expected = run_row_by_row(layer, 0, given)
    layer.run([(1, given[:8], 3)])
    layer.memory.copy(np.array([1]), np.array([2]))
    layer.memory.reset(np.array([1]))
    layer.accept(2, 2)
    assert torch.equal(layer.run([(2, given[7:], 0)]), expected[7:])
    assert torch.equal(layer.run([(1, given, 0)]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_loops_equal_the_definition(dtype: torch.dtype, data: st.DataObject) -> None:
    layers = [layer_of(BACKENDS[name](), dtype=dtype) for name in ("eager", "loops")]
    for step in range(3):
        owner = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        given = []
        for slot in owner:
            known, drafts = data.draw(st.integers(1, 9)), data.draw(st.integers(0, MAX_DRAFTS))
            given.append((slot, rows(known + drafts, 100 * step + slot), drafts))
        saved = data.draw(st.integers(1, len(given[-1][1]) - given[-1][2]))
        outs = [each.run(given, (Save(len(owner) - 1, saved, 3),)) for each in layers]
        tolerance = 2e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(outs[1], outs[0], atol=tolerance, rtol=tolerance)
        for mine, theirs in zip(layers[1].memory.tensors, layers[0].memory.tensors, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        for slot, _, drafts in given:
            stood = data.draw(st.integers(0, drafts))
            for each in layers:
                each.accept(slot, stood)


@pytest.mark.parametrize(
    ("kind", "prompt", "dtype"),
    [
        *((KIND, 37, dtype) for dtype in (torch.float32, *HALVES)),
        pytest.param(TWO, 17, torch.float32, marks=pytest.mark.if_changed),
        (THREE, 2, HALVES[0]),
    ],
    ids=str,
)
def test_ragged_passes_of_kernels_equal_the_definition(
    kind: RecurrentStateSpec, prompt: int, dtype: torch.dtype
) -> None:
    """Prompts run in chunks with states saved on the way, then partly accepted blocks, with padding rows."""
    backends = (("eager", 0), ("triton", 2))
    layers = [layer_of(BACKENDS[name](), kind, dtype, padding) for name, padding in backends]
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    enter = [(3, rows(prompt, 1, kind), 0), (2, rows(0, 0, kind), 0), (0, rows(2, 2, kind), 0)]
    blocks = [(0, rows(1 + MAX_DRAFTS, 3, kind), MAX_DRAFTS), (3, rows(3, 4, kind), 2)]
    again = [(3, rows(18, 5, kind), 0), (0, rows(4, 6, kind), 3)]
    saves = (Save(0, min(prompt, 16), 4),)
    for passed, saved, stood in ((enter, saves, (0, 0)), (blocks, (), (4, 2)), (again, (), (1, 0))):
        outs = [layer.run(passed, saved).float().cpu() for layer in layers]
        torch.testing.assert_close(outs[1], outs[0], atol=tolerance, rtol=tolerance)
        for part, other in zip(*(layer.memory.tensors for layer in layers), strict=True):
            torch.testing.assert_close(part.cpu(), other.cpu(), atol=tolerance, rtol=tolerance)
        for layer in layers:
            layer.accept(0, stood[0])
            layer.accept(3, stood[1])


@pytest.mark.parametrize("name", ["triton", "triton, batch-invariant"])
def test_no_bit_of_a_row_depends_on_the_other_rows(name: str) -> None:
    prompt, block = rows(20, 1, SMALL), rows(6, 2, SMALL)
    alone, crowded = (layer_of(BACKENDS[name](), SMALL) for _ in range(2))
    others = [[(0, rows(18, 3, SMALL), 0)], [(0, rows(2, 4, SMALL), 1), (4, rows(1, 5, SMALL), 0)]]
    for own, drafts, around in ((prompt, 0, others[0]), (block, 5, others[1]), (block[:2], 0, [])):
        expected = alone.run([(1, own, drafts)])
        got = crowded.run([*around, (1, own, drafts), *[(3, each, 0) for _, each, _ in around[:1]]])
        begin = sum(len(each) for _, each, _ in around)
        assert torch.equal(got[begin : begin + len(own)], expected)
        for part in crowded.memory.tensors:
            part[:, 3] = 0
        crowded.first_Z[3] = 0
        for each in (alone, crowded):
            each.accept(1, 3 if drafts else 0)
    for mine, theirs in zip(crowded.memory.tensors, alone.memory.tensors, strict=True):
        assert torch.equal(mine[:, 1], theirs[:, 1])


def test_byte_counts_equal_the_allocated_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        memory = StateMemory(3, KIND, NUM_SLOTS, MAX_DRAFTS, dtype, "cpu")
        counted = NUM_SLOTS * StateMemory.bytes_per_slot(3, KIND, MAX_DRAFTS, dtype)
        assert counted == sum(part.nbytes for part in memory.tensors)
