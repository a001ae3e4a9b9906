"""The kernels of gated delta layers against definition and transformers (device: see `devices.py`)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from manta.cluster.pages.recurrent_state_spec import RecurrentStateSpec
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.layers.gated_delta_net import DeltaNetShape
from manta.drafter.compute.memory.recurrent_state_cache import Save, StateMemory
from manta.jobs.doctor.cases.delta_rule import DeltaLayer
from support.engines.devices import DEVICE, HALVES
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_chunk_gated_delta_rule

# Heads of no round size; then a key head of Qwen3.5-9B and 35B-A3B, and of 27B with fewer columns.
ODD = RecurrentStateSpec(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=12, taps=4)
SMALL = RecurrentStateSpec(num_key_heads=1, num_value_heads=1, key_dim=8, value_dim=4, taps=4)
TWO, THREE = RecurrentStateSpec(1, 2, 128, 128, 4), RecurrentStateSpec(1, 3, 128, 16, 4)
NUM_SLOTS, MAX_DRAFTS, LAYER, PAGE_SIZE = 5, 5, 1, 16


def dice(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_shape(kind: RecurrentStateSpec, device: torch.device | str = "cpu") -> DeltaNetShape:
    heads = kind.num_value_heads
    return DeltaNetShape(
        kind,
        kernel_CT=dice(kind.channels, kind.taps, seed=6).to(device),
        rate_V=-dice(heads, seed=8).exp().to(device),
        dt_bias_V=dice(heads, seed=9).to(device),
        norm_F=(1.0 + 0.1 * dice(kind.value_dim, seed=7)).to(device),
        eps=1e-2,
    )


def rows_of(kind: RecurrentStateSpec, count: int, seed: int = 0) -> Tensor:
    width = kind.channels + kind.num_value_heads * (kind.value_dim + 2)
    return dice(count, width, seed=seed)


def layer_of(
    kind: RecurrentStateSpec,
    on_device: bool,
    dtype: torch.dtype = torch.float32,
    *,
    invariant: bool = False,
    padding: int = 0,
) -> DeltaLayer:
    """Return a layer that runs the definition or the device's kernels."""
    device = DEVICE if on_device else torch.device("cpu")
    backend = TritonBackend(DEVICE, batch_invariant=invariant) if on_device else EagerBackend()
    memory = StateMemory(2, kind, NUM_SLOTS, MAX_DRAFTS, dtype, device)
    return DeltaLayer(backend, make_shape(kind, device), memory, PAGE_SIZE, layer=LAYER, padding=padding)


def assert_same_memory(mine: DeltaLayer, theirs: DeltaLayer, tolerance: float) -> None:
    for part, other in zip(mine.memory.tensors, theirs.memory.tensors, strict=True):
        torch.testing.assert_close(part.cpu(), other.cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("kind", "prompt", "dtype"),
    [
        *((ODD, 37, dtype) for dtype in (torch.float32, *HALVES)),
        pytest.param(TWO, 17, torch.float32, marks=pytest.mark.if_changed),
        (THREE, 2, HALVES[0]),
    ],
    ids=str,
)
def test_ragged_passes_equal_the_definition(
    kind: RecurrentStateSpec, prompt: int, dtype: torch.dtype
) -> None:
    """Prompts run in chunks with states saved on the way, then partly accepted blocks, with padding rows."""
    layers = [layer_of(kind, False, dtype), layer_of(kind, True, dtype, padding=2)]
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    enter = [(3, rows_of(kind, prompt, 1), 0), (2, rows_of(kind, 0), 0), (0, rows_of(kind, 2, 2), 0)]
    blocks = [(0, rows_of(kind, 1 + MAX_DRAFTS, 3), MAX_DRAFTS), (3, rows_of(kind, 3, 4), 2)]
    again = [(3, rows_of(kind, 18, 5), 0), (0, rows_of(kind, 4, 6), 3)]
    saves = (Save(0, min(prompt, 16), 4),)
    for given, saved, stood in ((enter, saves, (0, 0)), (blocks, (), (4, 2)), (again, (), (1, 0))):
        outs = [layer.run(given, saved).cpu() for layer in layers]
        torch.testing.assert_close(outs[1].float(), outs[0].float(), atol=tolerance, rtol=tolerance)
        assert_same_memory(layers[1], layers[0], tolerance)
        for layer in layers:
            layer.accept(0, stood[0])
            layer.accept(3, stood[1])


def test_a_prompts_chunks_equal_transformers_for_equal_keys() -> None:
    """Keys are as of a repeated token: A is nearly all ones below its diagonal."""
    kind, layer = ODD, layer_of(ODD, True)
    mixed = rows_of(kind, 1).repeat(50, 1) + 0.01 * rows_of(kind, 50, 3)
    mixed[:, -12:-6], mixed[:, -6:] = 4.0, -9.0  # beta near 1, nothing decays
    shape = make_shape(kind)
    x, z, b, a = mixed.split([kind.channels, 72, 6, 6], dim=1)
    y = causal_conv1d_fn(x.T[None], shape.kernel_CT, activation="silu")[0].T
    q, k, v = (
        part.unflatten(1, (-1, size))[None]
        for part, size in zip(y.split([16, 16, 72], 1), (8, 8, 12), strict=True)
    )
    g = shape.rate_V * torch.nn.functional.softplus(a + shape.dt_bias_V)
    read, state = torch_chunk_gated_delta_rule(
        *(q, k, v, g[None], b.sigmoid()[None]), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    normed = torch.nn.functional.rms_norm(read[0], (12,), shape.norm_F, shape.eps).flatten(1)
    expected = normed * torch.nn.functional.silu(z)
    torch.testing.assert_close(layer.run([(2, mixed, 0)]).cpu(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.memory.states_LZVDF[LAYER, 2].cpu(), state[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("invariant", [False, True])
def test_no_bit_of_a_row_depends_on_the_other_rows(invariant: bool) -> None:
    def layer() -> DeltaLayer:
        return layer_of(SMALL, True, invariant=invariant)

    prompt, block = rows_of(SMALL, 20, 1), rows_of(SMALL, 6, 2)
    alone, crowded = layer(), layer()
    others = [[(0, rows_of(SMALL, 18, 3), 0)], [(0, rows_of(SMALL, 2, 4), 1), (4, rows_of(SMALL, 1, 5), 0)]]
    for given, drafts, around in ((prompt, 0, others[0]), (block, 5, others[1]), (block[:2], 0, [])):
        expected = alone.run([(1, given, drafts)])
        got = crowded.run([*around, (1, given, drafts), *[(3, each, 0) for _, each, _ in around[:1]]])
        begin = sum(len(rows) for _, rows, _ in around)
        assert torch.equal(got[begin : begin + len(given)], expected)
        for part in crowded.memory.tensors:
            part[:, 3] = 0
        crowded.first_Z[3] = 0
        for each in (alone, crowded):
            each.accept(1, 3 if drafts else 0)
    for mine, theirs in zip(crowded.memory.tensors, alone.memory.tensors, strict=True):
        assert torch.equal(mine[:, 1], theirs[:, 1])


@pytest.mark.parametrize("stood", (0, 2, MAX_DRAFTS))
def test_rejected_drafts_leave_no_trace_in_any_bit(stood: int) -> None:
    """Bits do not depend on how rows are cut: results equal those of rows one by one."""
    layer, given, wrong = layer_of(SMALL, True, invariant=True), rows_of(SMALL, 12), rows_of(SMALL, 12, 20)
    plain = layer_of(SMALL, True, invariant=True)
    expected = torch.cat([plain.run([(1, row, 0)]) for row in given.split(1)])
    reported = [layer.run([(1, given[:3], 0)])]
    drafts = torch.cat((given[3 : 4 + stood], wrong[: MAX_DRAFTS - stood]))
    reported.append(layer.run([(1, drafts, MAX_DRAFTS)])[: 1 + stood])
    layer.accept(1, stood)
    reported.append(layer.run([(1, given[4 + stood :], 0)]))
    assert torch.equal(torch.cat(reported), expected)
    for part, other in zip(layer.memory.tensors[:2], plain.memory.tensors[:2], strict=True):
        assert torch.equal(part[LAYER, 1], other[LAYER, 1]) and not part[1 - LAYER].any()
