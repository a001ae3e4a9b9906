"""The Numba loops of the CPU backend against PyTorch's operators, and row by row against themselves.

`test_drafter_layers.py` tests norms and gates of all backends, `test_step_operators.py` sampling.

Legend: N rows, H hidden, I inner size, Q query heads, K kv heads, D head dim, L layers.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.cpu_numba import layers as kernels
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.layers.linear import RMSNorm
from manta.drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from manta.drafter.step.cpu_numba.step_ops import LOOPS
from manta.drafter.step.inputs.gumbel_noise import negative_gumbel, noise_keys
from torch import Tensor

EPS = 1e-6
MAX_POSITIONS, NUM_PAGES, PAGE_SIZE = 300, 20, 16
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def weights(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape) + 0.5).to(dtype)


def rotary(head_dim: int, dtype: torch.dtype) -> RotaryEmbedding:
    return RotaryEmbedding(RopeConfig(head_dim, 1e4, "default", {}), MAX_POSITIONS, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype):
    """`batch_invariance.py` measures products and attention; this covers the other operations of a row."""
    x_NH, norm = torch.randn(33, 192).to(dtype), RMSNorm(weights(192, dtype=dtype), EPS)
    gate_up_NI, qkv_NO = torch.randn(33, 1024).to(dtype), torch.randn(33, 512).to(dtype)
    norm_JD, rope = weights(6, 64, dtype=dtype), rotary(64, dtype)

    def heads(rows: slice) -> Tensor:
        cache = PagedKVCache(1, NUM_PAGES, PAGE_SIZE, KVCacheSpec(2, 64, 64), dtype, "cpu")
        out_NO = qkv_NO[rows].clone()
        at_N = torch.arange(50, 83)[rows]
        kernels.norm_rotate_write(out_NO, 64, 4, 2, norm_JD, EPS, rope, at_N, at_N, cache.slots(0))
        return torch.cat((out_NO, cache.slots(0)[0, at_N]), dim=1)

    everything = slice(0, 33)
    for compute in (
        lambda rows: NumbaBackend().norm(norm, x_NH[rows]),
        lambda rows: kernels.gate(gate_up_NI[rows], "silu"),
        lambda rows: kernels.gate(gate_up_NI[rows], "gelu_tanh"),
        heads,
    ):
        together = compute(everything)
        for rows in (slice(0, 1), slice(7, 8), slice(3, 19), slice(32, 33)):
            assert torch.equal(compute(rows), together[rows])


def test_heads_normed_in_fp32_are_rounded_once_after_the_rotation():
    """At position 0 (no rotation) keys in bf16 are the nearest to the exact norm."""
    rows, norm_JD = torch.randn(300, 6 * 64).bfloat16(), 1 + 0.003 * torch.randn(4, 64)
    cache = PagedKVCache(1, NUM_PAGES, PAGE_SIZE, KVCacheSpec(2, 64, 64), torch.bfloat16, "cpu")
    at_N = torch.arange(300)
    x_NJD = rows.view(300, 6, 64)[:, :4].double()
    exact_NJD = x_NJD / (x_NJD.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm_JD.double()
    rope, start_N = rotary(64, torch.bfloat16), torch.zeros(300, dtype=torch.int64)
    kernels.norm_rotate_write(rows, 64, 2, 2, norm_JD, EPS, rope, start_N, at_N, cache.slots(0))
    assert (rows.view(300, 6, 64)[:, :4] == exact_NJD.bfloat16()).float().mean() > 0.9999
    assert torch.equal(cache.slots(0)[0, at_N, :128], rows[:, 128:256])


def test_results_are_rounded_to_bfloat16_as_pytorch_rounds():
    """Rounding is to nearest even, with infinities and NaNs; a norm with ones of rows of mean square 1."""
    bits = torch.randint(0, 2**16, (4096,), dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    gate_N1 = torch.full((4096, 1), 1.5, dtype=torch.bfloat16)
    got = kernels.gate(torch.cat((gate_N1, bits.view(-1, 1)), dim=1).contiguous(), "silu")
    silu = torch.nn.functional.silu(torch.tensor(1.5))
    exact = silu * bits.float()
    same = (got.flatten() == exact.to(torch.bfloat16)) | (got.flatten().isnan() & exact.isnan())
    assert same.float().mean() > 0.999, "more than a rare difference in the last place of silu(1.5)"
    assert torch.equal(got.flatten().isnan(), exact.isnan())


def test_the_loop_computes_the_exact_bits_of_the_noise():
    """With constant logits the choice follows the noise."""
    rows = np.arange(300)
    keys = torch.from_numpy(noise_keys(rows * 104729 - 5, rows)).unsqueeze(-1)
    expected_M = negative_gumbel(keys, 3000).double().argmin(dim=1)
    chosen_M, _ = LOOPS.noisy_argmax_margin(torch.zeros(300, 3000), torch.ones(300, 1), keys)
    assert torch.equal(chosen_M, expected_M)


def test_loops_run_without_a_cache_folder():
    """In a read-only image without a home folder Numba finds no place for its cache."""
    script = (
        "import torch; from numba.core import caching; caching.CacheImpl._locator_classes = []\n"
        "from manta.drafter.compute.cpu_numba.backend import NumbaBackend\n"
        "from manta.drafter.compute.layers.linear import RMSNorm\n"
        "print(NumbaBackend().norm(RMSNorm(torch.ones(4), 0.0), torch.ones(1, 4)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[[1.0, 1.0, 1.0, 1.0]]", done.stderr
