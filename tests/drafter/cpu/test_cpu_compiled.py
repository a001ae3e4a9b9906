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
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from manta.cluster.errors import ConfigError
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.backend import Backend, PlacedRows
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.cpu_fused.backend import FusedCpuBackend
from manta.drafter.compute.cpu_fused.operators import PackedLinear
from manta.drafter.compute.cpu_fused.qkv_heads import BLOCK
from manta.drafter.compute.cpu_fused.tiles.isa_dispatch import has_tiles
from manta.drafter.compute.cpu_numba import cpu_features
from manta.drafter.compute.cpu_numba.cpu_features import (
    VARIABLE,
    Instructions,
    all_instructions,
    bf16_instructions,
    mask_numba,
)
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from support.oracles.random_stacks import EPS, Numbers, RandomStack, StackShape
from support.paths import ROOT, TESTS
from torch import Tensor

pytestmark = pytest.mark.skipif(bf16_instructions() is None, reason="this CPU has no products of bf16")

WHOLE = os.environ.get("MANTA_GRID") == "whole"


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
class Shape(StackShape):
    """A stack of two blocks, and requests of (tokens computed, rows)."""

    requests: tuple[tuple[int, int], ...] = ((300, 16),)


GEMMA: dict[str, Any] = {
    "heads": (4, 1, 256),
    "windows": (20, None),
    "thetas": (1e4, 1e6),
    "norms_after": True,
    "fp32_norms": True,
    "activation": "gelu_tanh",
}
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
    "GELU": Shape(activation="gelu_tanh"),
    "rotations by layer": Shape(thetas=(1e4, 10.0), requests=((300, 16), (3, 1))),
    "norm weights in fp32": Shape(fp32_norms=True),
    "norms after attention and MLP": Shape(norms_after=True, requests=((300, 16), (3, 1))),
    "Gemma 3": Shape(**GEMMA, requests=((300, 16), (0, 40), (90, 1))),
    "heads of 96": Shape(heads=(4, 4, 96), hidden=64, inner=96, requests=((70, 16),)),
}


class Model:
    """A random stack, and the contexts of requests."""

    def __init__(self, shape: Shape, backend: Backend, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.backend = shape, backend
        self.first, self.counts = (list(numbers) for numbers in zip(*shape.requests, strict=True))
        num_pages = -(-max(map(sum, shape.requests)) // shape.page_size)
        ids = np.random.default_rng(0).permutation(num_pages * len(self.first))
        self.stack = RandomStack(backend, dtype, shape, ids.reshape(-1, num_pages), taps=(1, 0))
        numbers = self.stack.numbers
        self.x = numbers.tensor(sum(self.counts), shape.hidden).split(self.counts)
        self.past = [numbers.tensor(first, 2, *shape.heads[1:]) for first in self.first]

    def run(self, requests: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return normed rows, taps, and the last layer's K/V of the rows of all or some requests."""
        owners = list(range(len(self.first))) if requests is None else requests
        first, counts = ([numbers[r] for r in owners] for numbers in (self.first, self.counts))
        x, cache = torch.cat([self.x[r] for r in owners]), self._cache()
        normed, taps = self.stack.run(x, cache, owners, first, counts)
        assert taps is not None
        spans = [np.arange(at, at + count) for at, count in zip(first, counts, strict=True)]
        slots = torch.cat([self.stack.slots(r, span) for r, span in zip(owners, spans, strict=True)])
        return normed, taps, standard_order(cache, self.backend)[-1].flatten(0, 1)[slots]

    def _cache(self) -> PagedKVCache:
        """Return a cache with the past of every request, in every layer."""
        cache = self.stack.new_cache()
        for r, past in enumerate(self.past):
            cache.slots(0, 2)[:, self.stack.slots(r, np.arange(len(past)))] = past.flatten(1)
        if isinstance(self.backend, FusedCpuBackend):
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
    expected = Model(SHAPES[name], EagerBackend(), torch.float32).run()
    for got, right in zip(Model(SHAPES[name], FusedCpuBackend(2)).run(), expected, strict=True):
        assert got.dtype is torch.bfloat16 and got.shape == right.shape
        error = (got.float() - right).abs()
        # Of the size of bf16's rounding at every step, never of a wrong row.
        assert error.max() < 0.05 * right.abs().max() and error.mean() < 0.015 * right.abs().mean()


# The last has enough rows for two threads to work separately, and too few requests for three.
TOGETHER = {name: shape for name, shape in SHAPES.items() if len(shape.requests) > 1}
TOGETHER["equal requests"] = Shape(requests=((100, 16), (90, 16), (40, 16), (8, 16)))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_request_gets_the_same_bits_alone_and_among_others_on_any_number_of_threads(name: str):
    one, two, three = (Model(TOGETHER[name], FusedCpuBackend(threads)) for threads in (1, 2, 3))
    together = one.run()
    for model in (two, three):
        assert all(a.equal(b) for a, b in zip(model.run(), together, strict=True))
    alone = [two.run([r]) for r in range(len(two.first))]
    for i, whole in enumerate(together):
        assert torch.cat([parts[i] for parts in alone]).equal(whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_the_batch(threads: int):
    assert rows_are_invariant(FusedCpuBackend(threads), torch.bfloat16, "cpu")


def test_the_drafters_context_is_written_in_the_order_that_attention_reads():
    num_layers, num_kv, dim, rows = 3, 2, 64, 21
    numbers = Numbers(torch.bfloat16)
    norms, kv_NO = 1 + numbers.tensor(num_layers, dim, scale=0.1), random(rows, 2 * num_layers * num_kv * dim)
    placed = PlacedRows(torch.arange(100, 100 + rows), (torch.randperm(160)[:rows],), (None,))
    written = []
    for backend in (EagerBackend(), FusedCpuBackend(1)):
        cache = PagedKVCache(num_layers, 10, 16, KVCacheSpec(num_kv, dim, dim), torch.bfloat16, "cpu")
        backend.context_writer(norms, EPS, num_kv)(kv_NO.clone(), numbers.rope(dim), placed, cache, 0)
        written.append(standard_order(cache, backend).view(num_layers, -1, 2, num_kv, dim))
    torch.testing.assert_close(written[1], written[0], rtol=2e-2, atol=2e-2)
    assert written[1][:, :, 1].equal(written[0][:, :, 1]), "values are copied as they are"


def test_concurrent_callers_get_their_own_results():
    """One caller has the team, the others run alone: none waits, and results are not mixed."""
    layer = PackedLinear(random(512, 192), None, 2)
    inputs = [random(16, 192) for _ in range(4)]
    expected = [layer(x) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(500):
            if not layer(inputs[i]).equal(expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
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
    assert subprocess.run([sys.executable, "-c", SCRIPT], timeout=600, check=False).returncode == 0


# Of this machine's other instruction sets, in the short form the one whose code differs most.
LESSER = [
    kind
    for kind in all_instructions()
    if kind is not bf16_instructions() and (WHOLE or kind is Instructions.AVX2)
]


TREES = "test_a_stack_gives_paths_the_bits_of_chains_and_keeps_the_accepted_ones[fused]"


@pytest.mark.if_changed
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


@pytest.mark.parametrize(
    ("cpu", "named", "expected"),
    [
        ("znver5", None, Instructions.AVX512_BF16),
        ("sapphirerapids", None, Instructions.AVX512),
        ("sapphirerapids", "avx512_bf16", Instructions.AVX512_BF16),
    ],
)
def test_dot_products_are_used_where_they_are_fast_or_named(
    cpu: str, named: str | None, expected: Instructions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU with AVX512_BF16 whose AMX the system does not permit."""
    has = dict.fromkeys(("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16"), True)
    monkeypatch.setattr(cpu_features.binding, "get_host_cpu_features", lambda: has)
    monkeypatch.setattr(cpu_features.binding, "get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr(cpu_features.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    monkeypatch.setenv(VARIABLE, named or "")
    assert bf16_instructions.__wrapped__() is expected


def test_unknown_instructions_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "sse9")
    with pytest.raises(ConfigError, match=r"sse9.*none of amx, avx512_bf16") as caught:
        mask_numba()
    assert caught.value.param == VARIABLE
