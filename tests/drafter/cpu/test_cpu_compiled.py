"""The fused bf16 pass on a CPU: products, attention, stacks, threads, with all instruction sets.

Results are compared with PyTorch's operators in fp32 on the same bf16 numbers, and bit by bit with
themselves.

Legend: N rows, O outputs, K inputs (kv heads in shapes of attention), Q query heads, D head dim.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from manta.cluster.errors import ConfigError
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.backend import Backend, PlacedRows
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.block_weights import AttentionShape, BlockWeights, DenseMLP
from manta.drafter.compute.cpu_fused.backend import FusedCpuBackend
from manta.drafter.compute.cpu_fused.operators import PackedLinear
from manta.drafter.compute.cpu_fused.qkv_heads import BLOCK
from manta.drafter.compute.cpu_fused.tiles.isa_dispatch import has_tiles
from manta.drafter.compute.cpu_numba.cpu_features import (
    VARIABLE,
    Instructions,
    all_instructions,
    bf16_instructions,
    mask_numba,
)
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.layers.linear import RMSNorm
from manta.drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from support.paths import ROOT, TESTS
from torch import Tensor

pytestmark = pytest.mark.skipif(bf16_instructions() is None, reason="this CPU has no products of bf16")

EPS = 1e-6
WHOLE = os.environ.get("MANTA_GRID") == "whole"
MAX_POSITIONS = 640


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("num_rows", [1, 3, 8, 15, 16, 17, 31, 32, 33, 47, 64, 70, 600])
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 192), (192, 512), (100, 960), (33, 32)])
@pytest.mark.one_in(2)
def test_products_add_bias_and_residual_and_are_rounded_once(num_rows: int, outputs: int, inputs: int):
    x, weight = random(num_rows, inputs), random(outputs, inputs)
    bias, residual = random(outputs), random(num_rows, outputs)
    exact = x.double() @ weight.double().T
    got = PackedLinear(weight, None, 2)(x)
    # Half a unit in the last place of bf16, and what sums in fp32 lose.
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)
    exact += bias.double() + residual.double()
    layer = PackedLinear(weight, bias, 2)
    got = layer(x, residual)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)
    rows = [layer(x[i : i + 1], residual[i : i + 1]) for i in (0, num_rows // 2, num_rows - 1)]
    assert torch.cat(rows).equal(got[[0, num_rows // 2, num_rows - 1]]), "alone and among others"


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 320), (64, 1056)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(outputs: int, inputs: int):
    x, layer = random(200, inputs), PackedLinear(random(outputs, inputs), None, 1)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
    for count in range(1, len(x) + 1):
        assert layer(x[:count]).equal(alone[:count]), count


@dataclass(frozen=True)
class Shape:
    """A stack of two blocks, and requests of (tokens computed, rows)."""

    heads: tuple[int, int, int] = (4, 2, 64)
    hidden: int = 192
    inner: int = 512
    normed: bool = True
    biased: bool = False
    causal: bool = True
    windows: tuple[int | None, int | None] = (None, None)
    scale: float = 0.125
    page_size: int = 16
    requests: tuple[tuple[int, int], ...] = ((300, 16),)


SHAPES = {
    "a block": Shape(),
    "a row": Shape(requests=((37, 1),)),
    "a scale of its own": Shape(scale=0.3),
    "a drafter's block": Shape(causal=False, requests=((100, 16), (5, 8))),
    "a prompt": Shape(requests=((0, 213),)),
    "eight requests": Shape(requests=tuple((17 * i, 16 - i % 3) for i in range(8))),
    "prompts beside rows": Shape(requests=((64, 1), (0, 40), (300, 5), (15, 17))),
    "windows": Shape(windows=(20, None), requests=((200, 16), (3, 4), (90, 33))),
    "windows both ways": Shape(windows=(7, 40), causal=False, requests=((200, 16),)),
    "no head norm, biases": Shape(normed=False, biased=True, requests=((50, 16), (2, 3))),
    "no shared heads": Shape(heads=(6, 6, 32), page_size=32, requests=((70, 16), (33, 4))),
    "six heads of 128 share one": Shape(heads=(6, 1, 128), page_size=64, requests=((70, 16), (130, 1))),
    "heads of 96": Shape(heads=(4, 4, 96), hidden=64, inner=96, requests=((70, 16),)),
}


class Model:
    """Random weights, and the same requests' contexts for any backend."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        torch.manual_seed(1)
        num_q, num_kv, dim = shape.heads
        widths = {
            "qkv": ((num_q + 2 * num_kv) * dim, shape.hidden),
            "o": (shape.hidden, num_q * dim),
            "gate_up": (2 * shape.inner, shape.hidden),
            "down": (shape.hidden, shape.inner),
        }
        self.layers = [
            {name: random(*size) * size[1] ** -0.5 for name, size in widths.items()}
            | {f"{name}_bias": random(size[0]) if shape.biased else None for name, size in widths.items()}
            | {name: 1 + 0.1 * random(shape.hidden) for name in ("attention_norm", "mlp_norm")}
            | {name: 1 + 0.1 * random(dim) if shape.normed else None for name in ("q", "k")}
            for _ in shape.windows
        ]
        self.final = 1 + 0.1 * random(shape.hidden)
        rows = sum(count for _, count in shape.requests)
        longest = max(first + count for first, count in shape.requests)
        pages = -(-longest // shape.page_size)
        self.num_pages = pages * len(shape.requests)
        self.pages = np.random.default_rng(0).permutation(self.num_pages).reshape(len(shape.requests), pages)
        self.x = random(rows, shape.hidden)
        self.past = [random(first, 2, num_kv, dim) for first, _ in shape.requests]

    def run(
        self, backend: Backend, dtype: torch.dtype, requests: list[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return normed rows, taps, and the last layer's K/V of the rows of all or some requests."""
        owner = list(range(len(self.shape.requests))) if requests is None else requests
        stack, cache = self._stack(backend, dtype), self._cache(backend, dtype)
        counts = np.array([count for _, count in self.shape.requests])
        starts = np.cumsum(counts) - counts
        mine = torch.cat([torch.arange(starts[r], starts[r] + counts[r]) for r in owner])
        rows = self._placed(backend, owner)
        normed, taps = stack(self.x[mine].to(dtype), rows, cache)
        assert taps is not None
        kv = standard_order(cache, backend)[-1].flatten(0, 1)[rows.kv_slots[0]]
        return normed, taps, kv

    def _stack(self, backend: Backend, dtype: torch.dtype):
        num_q, num_kv, dim = self.shape.heads

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(dtype)

        rope = RotaryEmbedding(RopeConfig(dim, 1e4, "default", {}), MAX_POSITIONS, torch.bfloat16, "cpu")
        rope.cos_TD, rope.sin_TD = rope.cos_TD.to(dtype), rope.sin_TD.to(dtype)
        blocks = []
        for weights, window in zip(self.layers, self.shape.windows, strict=True):
            w = {name: cast(value) for name, value in weights.items()}
            heads = (num_q, num_kv, dim, dim, w["q"], w["k"], EPS, rope)
            shape = AttentionShape(*heads, self.shape.scale, self.shape.causal, window)
            parts = {
                name: backend.linear(w[name], w[f"{name}_bias"]) for name in ("qkv", "o", "gate_up", "down")
            }
            mlp = DenseMLP(gate_up=parts.pop("gate_up"), down=parts.pop("down"))
            norms = {name: RMSNorm(w[name], EPS) for name in ("attention_norm", "mlp_norm")}
            blocks.append((shape, BlockWeights(**parts, mlp=mlp, **norms)))
        return backend.stack(blocks, RMSNorm(self.final.to(dtype), EPS), (1, 0))

    def _placed(self, backend: Backend, owner: list[int]) -> PlacedRows:
        first, counts = (np.array([self.shape.requests[r][i] for r in owner]) for i in (0, 1))
        positions = [np.arange(at, at + count) for at, count in zip(first, counts, strict=True)]
        slots = [self._slots(r, at) for r, at in zip(owner, positions, strict=True)]
        batch = backend.attention_batch(first, counts, self.pages[owner], self.shape.page_size, "cpu")
        return PlacedRows(
            torch.from_numpy(np.concatenate(positions)), (torch.from_numpy(np.concatenate(slots)),), (batch,)
        )

    def _slots(self, request: int, positions: np.ndarray) -> np.ndarray:
        size = self.shape.page_size
        return self.pages[request][positions // size] * size + positions % size

    def _cache(self, backend: Backend, dtype: torch.dtype) -> PagedKVCache:
        """Return a cache with the past of every request, in every layer."""
        _, num_kv, dim = self.shape.heads
        geometry = KVCacheSpec(num_kv, dim, dim)
        cache = PagedKVCache(2, self.num_pages, self.shape.page_size, geometry, dtype, "cpu")
        for r, past in enumerate(self.past):
            slots = torch.from_numpy(self._slots(r, np.arange(len(past))))
            cache.slots(0, 2)[:, slots] = past.to(dtype).flatten(1)
        if isinstance(backend, FusedCpuBackend):
            cache.planes(0, 2).copy_(blocked_order(cache.planes(0, 2)))
        return cache


def blocked_order(kv: Tensor) -> Tensor:
    """Return [L, P, S, 2, K, D] in `drafter/compute/cpu_fused/qkv_heads.py`'s order, same shape."""
    layers, _, _, _, heads, dim = kv.shape
    k, v = kv.view(layers, -1, BLOCK, 2, heads, dim).unbind(3)  # [L, B, 16, K, D]
    k = k.transpose(2, 3)  # [L, B, K, 16, D]
    if not has_tiles():
        k = k.unflatten(4, (-1, 2)).transpose(3, 4)  # [L, B, K, D / 2, 16, 2]
    v = v.reshape(layers, -1, 8, 2, heads, dim // 16, 16).permute(0, 1, 4, 5, 2, 6, 3)
    return torch.stack(
        (k.reshape(layers, -1, heads, BLOCK * dim), v.reshape(layers, -1, heads, BLOCK * dim)), 2
    ).view(kv.shape)


def standard_order(cache: PagedKVCache, backend: Backend) -> Tensor:
    kv = cache.planes(0, cache.num_layers)
    if not isinstance(backend, FusedCpuBackend):
        return kv
    layers, _, _, _, heads, dim = kv.shape
    k, v = kv.view(layers, -1, 2, heads, BLOCK * dim).unbind(2)
    if not has_tiles():
        k = k.unflatten(3, (dim // 2, BLOCK, 2)).transpose(3, 4).flatten(3)
    k = k.reshape(layers, -1, heads, BLOCK, dim).transpose(2, 3)
    v = v.view(layers, -1, heads, dim // 16, 8, 16, 2).permute(0, 1, 4, 6, 2, 3, 5).reshape(k.shape)
    return torch.stack((k, v), 3).reshape(kv.shape)


@pytest.mark.parametrize("name", SHAPES)
def test_a_stack_computes_what_pytorch_does(name: str):
    model = Model(SHAPES[name])
    expected = model.run(EagerBackend(), torch.float32)
    for got, right in zip(model.run(FusedCpuBackend(2), torch.bfloat16), expected, strict=True):
        assert got.dtype is torch.bfloat16 and got.shape == right.shape
        error = (got.float() - right).abs()
        # Of the size of bf16's rounding at every step, never of a wrong row.
        assert error.max() < 0.05 * right.abs().max() and error.mean() < 0.01 * right.abs().mean()


@pytest.mark.parametrize("name", [name for name in SHAPES if len(SHAPES[name].requests) > 1])
def test_a_request_gets_the_same_bits_alone_and_among_others_on_any_number_of_threads(name: str):
    model = Model(SHAPES[name])
    together = model.run(FusedCpuBackend(1), torch.bfloat16)
    for threads in (2, 3):
        again = model.run(FusedCpuBackend(threads), torch.bfloat16)
        assert all(a.equal(b) for a, b in zip(again, together, strict=True))
    alone = [model.run(FusedCpuBackend(2), torch.bfloat16, [r]) for r in range(len(model.shape.requests))]
    for i, whole in enumerate(together):
        assert torch.cat([parts[i] for parts in alone]).equal(whole)


def test_equal_requests_are_divided_among_threads_with_the_same_result():
    """There are enough rows for two threads to work separately, and too few requests for three."""
    model = Model(replace(SHAPES["a block"], requests=((100, 16), (90, 16), (40, 16), (8, 16))))
    one, two, three = (model.run(FusedCpuBackend(n), torch.bfloat16) for n in (1, 2, 3))
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(one, two, three, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_the_batch(threads: int):
    assert rows_are_invariant(FusedCpuBackend(threads), torch.bfloat16, "cpu")


def test_the_drafters_context_is_written_in_the_order_that_attention_reads():
    num_layers, num_kv, dim, rows = 3, 2, 64, 21
    norms, kv_NO = 1 + 0.1 * random(num_layers, dim), random(rows, 2 * num_layers * num_kv * dim)
    rope = RotaryEmbedding(RopeConfig(dim, 1e4, "default", {}), MAX_POSITIONS, torch.bfloat16, "cpu")
    positions = torch.arange(100, 100 + rows)
    placed = PlacedRows(positions, (torch.randperm(160)[:rows],), (None,))
    written = []
    for backend in (EagerBackend(), FusedCpuBackend(1)):
        cache = PagedKVCache(num_layers, 10, 16, KVCacheSpec(num_kv, dim, dim), torch.bfloat16, "cpu")
        backend.context_writer(norms, EPS, num_kv)(kv_NO.clone(), rope, placed, cache, 0)
        written.append(standard_order(cache, backend))
    torch.testing.assert_close(written[1], written[0], rtol=2e-2, atol=2e-2)
    assert (
        written[1]
        .view(num_layers, -1, 2, num_kv, dim)[:, :, 1]
        .equal(written[0].view(num_layers, -1, 2, num_kv, dim)[:, :, 1])
    ), "values are copied as they are"


def test_concurrent_callers_get_their_own_results():
    """One caller has the team, the others run alone: none waits, and results are not mixed."""
    layer = PackedLinear(random(512, 192), None, 2)
    inputs = [random(16, 192) for _ in range(4)]
    expected = [layer(x) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(2000):
            if not layer(inputs[i]).equal(expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


SCRIPT = """
import os, torch
from manta.drafter.compute.cpu_fused.operators import PackedLinear
layer = PackedLinear(torch.randn(64, 32).bfloat16(), None, 2)
x = torch.randn(4, 32).bfloat16()
expected = layer(x)
child = os.fork()
if child == 0:
    os._exit(0 if layer(x).equal(expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_makes_its_own_threads():
    assert subprocess.run([sys.executable, "-c", SCRIPT], timeout=120, check=False).returncode == 0


# Of this machine's other instruction sets, in the short form the one whose code differs most.
LESSER = [
    kind
    for kind in all_instructions()
    if kind is not bf16_instructions() and (WHOLE or kind is Instructions.AVX2)
]


TREES = "test_a_stack_gives_paths_the_bits_of_chains_and_keeps_the_accepted_ones[fused]"


@pytest.mark.parametrize("kind", LESSER, ids=lambda kind: kind.value)
def test_the_tests_pass_with_fewer_cpu_instructions(kind: Instructions):
    """Tests run again in a process with fewer instructions; speculation changes no token.

    A process compiles everything anew, so the short form runs the layers alone, whose bits do not depend on
    the batch, and products with weights of 8 and 4 bits.
    """
    lossless = (
        "test_speculation_changes_no_token_in_bf16_if_products_do_not_depend_on_the_batch[compiled-0.0]"
    )
    trees = TESTS / "drafter" / "compute" / "test_draft_trees.py"
    tests = [__file__, str(TESTS / "drafter" / "cpu" / "test_cpu_codes.py"), f"{trees}::{TREES}"]
    some = "stack or bits or context"
    if WHOLE:
        tests.append(f"{TESTS / 'end_to_end' / 'lossless' / 'test_shipped_pair.py'}::{lossless}")
        some += " or rounded_once or in_bf16"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", some]
    environment = {**os.environ, VARIABLE: kind.value}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, timeout=600, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_unknown_instructions_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "sse9")
    with pytest.raises(ConfigError, match=r"sse9.*none of amx, avx512_bf16") as caught:
        mask_numba()
    assert caught.value.param == VARIABLE
