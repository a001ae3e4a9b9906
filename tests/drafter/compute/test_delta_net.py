"""The gated delta rule equals transformers'; its bits do not depend on how rows are cut.

Slots here are a memory's, rows those of a layer's product.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.eager.delta_rule import chunk, conv_chunk, conv_fold, fold, unit
from manta.drafter.compute.layers.gated_delta_net import DeltaNetShape
from manta.drafter.compute.memory.recurrent_state_cache import Save, StateMemory
from manta.jobs.doctor.cases.delta_rule import DeltaLayer
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

KIND = RecurrentStateSpec(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=12, taps=4)
WIDTH = KIND.channels + 6 * 12 + 2 * 6
NUM_SLOTS, MAX_DRAFTS, LAYER = 4, 5, 1
BACKENDS = (EagerBackend(), NumbaBackend())


def rows(count: int, seed: int = 0, width: int = WIDTH) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def operands(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k = (unit(rows(count, seed, 16).unflatten(1, (2, 8))) for seed in (1, 2))
    v = rows(count, 3, 72).unflatten(1, (6, 12))
    return q * 8**-0.5, k, v, -rows(count, 4, 6).exp(), rows(count, 5, 6).sigmoid()


def make_shape() -> DeltaNetShape:
    kernel, norm = rows(KIND.channels, 6, 4), 1.0 + 0.1 * rows(1, 7, 12)[0]
    return DeltaNetShape(KIND, kernel, -rows(1, 8, 6)[0].exp(), rows(1, 9, 6)[0], norm, 1e-2)


SHAPE = make_shape()


def layer_of(backend: Backend, dtype: torch.dtype = torch.float32) -> DeltaLayer:
    memory = StateMemory(2, KIND, NUM_SLOTS, MAX_DRAFTS, dtype, "cpu")
    return DeltaLayer(backend, SHAPE, memory, page_size=16, layer=LAYER)


def run_row_by_row(layer: DeltaLayer, slot: int, given: Tensor) -> Tensor:
    return torch.cat([layer.run([(slot, row, 0)]) for row in given.split(1)])


@pytest.fixture
def layer(backend: Backend) -> DeltaLayer:
    return layer_of(backend)


@pytest.mark.parametrize("count", [1, 7, 70])
def test_outputs_and_states_equal_transformers_chunked_rule(count: int) -> None:
    """transformers' chunks are 64 rows of matrix products."""
    q, k, v, g, beta = operands(count)
    state = 0.3 * rows(6 * 8, 10, 12).view(6, 8, 12)
    read, records, behind = chunk(q, k, v, g, beta, state)
    scaled = (x[None] for x in (q * 8**0.5, k, v, g, beta))
    theirs, end = torch_chunk_gated_delta_rule(*scaled, initial_state=state[None], output_final_state=True)
    torch.testing.assert_close(read, theirs[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(behind, end[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fold(state, records, count), end[0], atol=1e-5, rtol=1e-4)


def test_folding_a_prefix_gives_the_bits_of_a_shorter_pass() -> None:
    q, k, v, g, beta = operands(9)
    state, x, window = rows(48, 10, 12).view(6, 8, 12), rows(9, 11, 10), rows(3, 12, 10)
    _, records, _ = chunk(q, k, v, g, beta, state)
    for count in range(10):
        *_, behind = chunk(*(part[:count] for part in (q, k, v, g, beta)), state)
        assert torch.equal(fold(state, records, count), behind)
        assert torch.equal(conv_fold(window, x, count), torch.cat((window, x))[count : count + 3])


def test_the_convolution_equals_transformers() -> None:
    x, kernel = rows(20, 13, 10), rows(10, 14, 4)
    theirs = causal_conv1d_fn(x.T[None], kernel, activation="silu")[0].T
    first = conv_chunk(x[:2], torch.zeros(3, 10), kernel)
    second = conv_chunk(x[2:], conv_fold(torch.zeros(3, 10), x[:2], 2), kernel)
    torch.testing.assert_close(torch.cat((first, second)), theirs)


def test_a_layer_equals_one_of_transformers_parts(layer: DeltaLayer) -> None:
    mixed = rows(30)
    x, z, b, a = mixed.split([KIND.channels, 72, 6, 6], dim=1)
    y = causal_conv1d_fn(x.T[None], SHAPE.kernel_CT, activation="silu")[0].T
    q, k, v = (
        part.unflatten(1, (-1, size))[None]
        for part, size in zip(y.split([16, 16, 72], 1), (8, 8, 12), strict=True)
    )
    g = SHAPE.rate_V * torch.nn.functional.softplus(a + SHAPE.dt_bias_V)
    read, _ = torch_chunk_gated_delta_rule(q, k, v, g[None], b.sigmoid()[None], use_qk_l2norm_in_kernel=True)
    norm = Qwen3_5RMSNormGated(12, eps=SHAPE.eps)
    norm.weight.data = SHAPE.norm_F
    expected = norm(read[0], z.unflatten(1, (6, 12))).flatten(1).detach()
    torch.testing.assert_close(layer.run([(2, mixed, 0)]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("stood", range(MAX_DRAFTS + 1))
def test_rejected_drafts_leave_no_trace_in_any_bit(layer: DeltaLayer, stood: int) -> None:
    """A prompt, partly accepted drafts, more drafts and the rest equal a pass row by row."""
    given, wrong = rows(24), rows(24, seed=20)
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
    layers = [layer_of(backend, dtype) for backend in BACKENDS]
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


def test_byte_counts_equal_the_allocated_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        memory = StateMemory(3, KIND, NUM_SLOTS, MAX_DRAFTS, dtype, "cpu")
        counted = NUM_SLOTS * StateMemory.bytes_per_slot(3, KIND, MAX_DRAFTS, dtype)
        assert counted == sum(part.nbytes for part in memory.tensors)
