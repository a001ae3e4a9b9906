"""MLA on every backend: absorbed and expanded attention equal PyTorch's operators over whole prompts.

`test_target_decoder.py` compares those with transformers.

Legend: N rows, J heads, E and R head dims not rotated and rotated, F of values, C values of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.block_weights import AttentionShape
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.attention import mla as latent
from manta.drafter.compute.gpu_triton.attention import mla_prefill_work as expansion
from manta.drafter.compute.gpu_triton.attention.attention_tiles import (
    AttentionWorkspace,
    choose_tiles,
    list_work,
    rows_from_host,
)
from manta.drafter.compute.gpu_triton.attention.mla import latent_kind
from manta.drafter.compute.gpu_triton.attention.mla_prefill_work import (
    Expansion,
    ExpansionWorkspace,
    find_expansion,
)
from manta.drafter.compute.gpu_triton.attention.paged_attention import verify_attention
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.layers.linear import Linear, RMSNorm
from manta.drafter.compute.layers.mla import MLALayer
from manta.drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from manta.drafter.compute.memory.kv_cache import PagedKVCache
from support.checkpoints.tiny import make_tiny_target
from support.engines.device_engines import Twins
from support.engines.devices import DEVICE, ON_GPU
from support.oracles.random_stacks import placed_rows
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_the_device")
PAGE, PAGES = 16, 24
J, E, R, F, C = 6, 20, 8, 12, 32
FEWEST = 33  # rows of a request from which it is expanded, of these sizes
Q_RANK = 24


@pytest.fixture(scope="module")
def layer() -> AttentionShape:
    with torch.device(DEVICE):
        return random_layer()


def random_layer() -> AttentionShape:
    torch.manual_seed(3)
    rope = RotaryEmbedding(RopeConfig(R, 1e4, "default", {}), PAGE * PAGES, torch.float32, DEVICE)
    parts = MLALayer(
        q_norm=RMSNorm(1 + 0.3 * torch.randn(Q_RANK), 1e-2),
        q_up=Linear(torch.randn(J * (E + R), Q_RANK) * Q_RANK**-0.5),
        kv_norm=RMSNorm(1 + 0.3 * torch.randn(C), 1e-2),
        kv_up_JUC=torch.randn(J, E + F, C) * C**-0.5,
        v_dim=F,
    )
    return AttentionShape(J, 1, C + R, C, None, None, 1e-6, rope, scale=0.4, latent=parts)


class Requests:
    """Prompts in scattered pages, computed in steps."""

    def __init__(self, layer: AttentionShape, backend: Backend, lengths: list[int]) -> None:
        torch.manual_seed(5)
        self._layer, self._backend = layer, backend
        self._attend = backend.attention(layer)  # type: ignore[attr-defined]  # of an operating backend
        geometry = KVCacheSpec(1, C + R, C, v_in_k=True)
        self.cache = PagedKVCache(1, PAGES, PAGE, geometry, torch.float32, DEVICE)
        self.cache.kv.fill_(100.0)  # reading an unwritten value must show
        self.rows = [torch.randn(length, Q_RANK + C + R) for length in lengths]
        self.computed = [0] * len(lengths)
        self._pages = np.arange(PAGES).reshape(-1, len(lengths)).T[:, ::-1].copy()

    def compute(self, counts: dict[int, int]) -> list[Tensor]:
        """Return attention's result for a number of further rows of each request."""
        owner, num = list(counts), list(counts.values())
        first = [self.computed[r] for r in owner]
        spans = [range(at, at + n) for at, n in zip(first, num, strict=True)]
        rows = placed_rows(self._backend, first, num, [self._pages[owner]], PAGE, torch.device(DEVICE))
        qkv = torch.cat([self.rows[r][span.start : span.stop] for r, span in zip(owner, spans, strict=True)])
        out = self._attend(qkv.clone(), self._backend.begin(rows), self.cache, 0)  # type: ignore[attr-defined]
        for r, n in counts.items():
            self.computed[r] += n
        return list(out.split(num))

    def check(self, counts: dict[int, int]) -> None:
        """Assert the definition's results for a number of further rows of each request."""
        for (request, count), got in zip(counts.items(), self.compute(counts), strict=True):
            assert_close(got, self.exact(request, count))

    def share(self, source: int, target: int, num_pages: int) -> None:
        """Let a new request start with another's first pages."""
        self._pages[target][:num_pages] = self._pages[source][:num_pages]
        self.computed[target] = num_pages * PAGE
        self.rows[target][: num_pages * PAGE] = self.rows[source][: num_pages * PAGE]

    def exact(self, request: int, count: int) -> Tensor:
        """Return the result of a request's last rows by PyTorch's operators, from all its rows at once."""
        seen = self.computed[request]
        alone = Requests(self._layer, EagerBackend(), [seen])
        alone.rows[0] = self.rows[request][:seen]
        return alone.compute({0: seen})[0][-count:]


TOLERANCE = 1e-3 if ON_GPU else 2e-5
NEEDS_CPU = pytest.mark.skipif(ON_GPU, reason="compiled loops run on CPUs")
BACKENDS = {
    "torch": EagerBackend,
    "loops": NumbaBackend,
    "triton": lambda: TritonBackend(DEVICE),
    "triton, batch-invariant": lambda: TritonBackend(DEVICE, batch_invariant=True),
}


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=[pytest.param(n, marks=NEEDS_CPU) if n == "loops" else n for n in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    """A backend with latent attention; Triton's is also batch-invariant."""
    return BACKENDS[request.param]()


def test_chunks_and_blocks_equal_the_definition_of_a_whole_prompt(
    layer: AttentionShape, backend: Backend
) -> None:
    """A prompt is computed in chunks with other requests, then blocks of rows, some after a rejection."""
    requests = Requests(layer, backend, [70, 20, 5])
    for counts in ({0: 33, 2: 4}, {0: 20, 1: 9}, {1: 8, 0: 1, 2: 1}):
        requests.check(counts)
    requests.computed[0] -= 1  # the last row was rejected: another takes its place
    requests.rows[0][requests.computed[0]] = torch.randn(Q_RANK + C + R)
    requests.check({0: 6})


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_a_draft_that_is_no_number_changes_no_row_before_it(
    layer: AttentionShape, backend: Backend, wrong: float
) -> None:
    """In the block, where its key is masked, and after its rejection, where another takes its place."""
    requests = Requests(layer, backend, [70, 20])
    requests.compute({0: 40, 1: 9})
    later = requests.rows[0][45:48].clone()
    requests.rows[0][45:48] = wrong
    got = requests.compute({0: 8, 1: 3})
    requests.rows[0][45:48] = later
    assert_close(got[0][:5], requests.exact(0, 8)[:5])
    assert_close(got[1], requests.exact(1, 3))
    requests.computed[0] = 45
    requests.check({0: 2})


def test_overflows_of_an_expanded_prompt_change_no_row_before_them() -> None:
    """In fp16 the product of a latent with the heads' up-projection may be infinite."""
    torch.manual_seed(6)
    half, count, before = torch.float16, FEWEST + 5, FEWEST - 3
    parts = replace(random_layer().latent, kv_up_JUC=torch.randn(J, E + F, C).to(DEVICE, half))
    cache = PagedKVCache(1, PAGES, PAGE, KVCacheSpec(1, C + R, C, v_in_k=True), half, DEVICE)
    cache.slots(0)[0, :count] = torch.randn(count, C + R).to(DEVICE, half) / 4
    q_NJO = torch.randn(count, J, E + R).to(DEVICE, half) / 4
    pages = np.arange(PAGES)[None]
    rows = rows_from_host(np.array([0]), np.array([count]), pages, PAGE, torch.device(DEVICE))
    results = []
    for _ in range(2):
        found = find_expansion(rows, ExpansionWorkspace(parts, C + R, FEWEST))
        assert found is not None
        out_NJF = torch.empty(count, J, F, dtype=half, device=DEVICE)
        latent.attend_expanded(q_NJO, parts, cache.pages(0), found, 0.4, out_NJF)
        results.append(out_NJF)
        cache.slots(0)[0, before:count, :C] = 60000.0
    values = torch.einsum("tc,juc->tju", cache.slots(0)[0, :count, :C], parts.kv_up_JUC)[..., E:]
    assert values[:before].isfinite().all() and not values[before:].isfinite().all()
    assert torch.equal(results[0][:before], results[1][:before])


@NEEDS_CPU
def test_a_row_has_the_same_bits_in_a_block_alone_and_in_a_prompt(layer: AttentionShape) -> None:
    block = Requests(layer, NumbaBackend(), [40, 9])
    block.compute({0: 30, 1: 5})
    (together, _) = block.compute({0: 10, 1: 1})
    alone = Requests(layer, NumbaBackend(), [40, 9])
    alone.compute({0: 30})
    apart = torch.cat([alone.compute({0: 1})[0] for _ in range(10)])
    whole = Requests(layer, NumbaBackend(), [40, 9])
    (prompt,) = whole.compute({0: 40})
    assert torch.equal(together, apart) and torch.equal(together, prompt[30:])


@pytest.fixture
def expansions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Expansion]]:
    """Record all expansions over passes and layers."""
    attend, found = latent.attend_expanded, list[Expansion]()

    def watched(q_NJO: Tensor, parts: MLALayer, pages_PSW: Tensor, of: Expansion, *more: object) -> None:
        found.append(of)
        attend(q_NJO, parts, pages_PSW, of, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(latent, "attend_expanded", watched)
    yield found


@pytest.mark.parametrize("piece_keys", [4096, 40, 13], ids="in {} keys at a time".format)
@pytest.mark.one_in(2)
def test_expanded_long_prompts_equal_the_definition(
    layer: AttentionShape, expansions: list[Expansion], monkeypatch: pytest.MonkeyPatch, piece_keys: int
) -> None:
    """Several requests run together, some in chunks; a short prompt and single rows are not expanded."""
    monkeypatch.setattr(expansion, "PIECE_KEYS", piece_keys)
    requests = Requests(layer, TritonBackend(DEVICE), [110, 75, 30])
    passes = ({0: 40, 1: FEWEST, 2: 4}, {0: FEWEST - 1, 1: 2}, {2: 3, 0: FEWEST}, {1: 40}, {0: 5, 2: 1})
    for counts in passes:
        requests.check(counts)
    assert [found.num_keys for found in expansions] == [40 + FEWEST, 40 + 2 * FEWEST - 1, 75]
    assert [found.takes_all for found in expansions] == [False, False, True]
    assert [found.num_splits for found in expansions] == [1, 3, 3], "programs of a tile"


def test_an_expanded_prompt_continues_after_absorbed_rows(
    layer: AttentionShape, expansions: list[Expansion]
) -> None:
    """The first pages of a prefix hit are another request's, whose rows came a few at a time."""
    requests = Requests(layer, TritonBackend(DEVICE), [3 * PAGE, 3 * PAGE + 20])
    for _ in range(6):
        requests.compute({0: PAGE // 2})
    assert not expansions
    requests.share(0, 1, num_pages=2)
    requests.check({1: PAGE + 20})
    assert len(expansions) == 1


def test_guaranteed_bits_are_those_of_absorbed_rows(
    layer: AttentionShape, expansions: list[Expansion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lengths on the host no request can be expanded."""

    def prompts(*, batch_invariant: bool) -> Tensor:
        requests = Requests(layer, TritonBackend(DEVICE, batch_invariant=batch_invariant), [80, 50])
        return torch.cat(requests.compute({0: 80, 1: 50}))

    promised, expanded = prompts(batch_invariant=True), prompts(batch_invariant=False)
    assert len(expansions) == 1
    unknown = staticmethod(lambda *places: replace(rows_from_host(*places), host_spans_B2=None))
    monkeypatch.setattr(TritonBackend, "attention_batch", unknown)
    assert torch.equal(promised, prompts(batch_invariant=True))
    assert_close(expanded, prompts(batch_invariant=False))
    assert len(expansions) == 1


def test_the_runner_expands_prompts_without_waits_and_gives_the_hosts_tokens(
    tmp_path: Path, expansions: list[Expansion]
) -> None:
    """A whole prompt runs with the first chunk of another; its rest runs with drafts, which are absorbed."""
    target = make_tiny_target(tmp_path, "deepseek_v3", seed=5)
    random = np.random.default_rng(2)
    twins = Twins.open(target, None, [random.integers(1, 90, n).tolist() for n in (40, 27)], method="ngram")
    enter = [twins.steps.admit(slot, tokens) for slot, tokens in enumerate(twins.known)]
    twins.run([0, 0], [12, 27], [0, 0], admitted=enter, samples=[False, True])
    twins.run([12, 27], [28, 4], [0, 3])
    assert {(found.num_keys, found.takes_all) for found in expansions} == {(27, False), (40, True)}
    num_passes = len(expansions)
    twins.run(twins.computed(), [4, 4], [3, 3])
    assert len(expansions) == num_passes


@pytest.mark.parametrize(
    ("sizes", "minimum"), [((128, 128, 512), 171), ((192, 128, 512), 233), ((20, 12, 16), None)]
)
def test_the_row_count_for_expanding_follows_from_the_sizes(
    layer: AttentionShape, sizes: tuple[int, int, int], minimum: int | None
) -> None:
    """The sizes are Kimi K2's and DeepSeek-V3's, with wider queries, and with heads wider than a latent."""
    nope, v_dim, rank = sizes
    assert layer.latent is not None
    parts = replace(layer.latent, kv_up_JUC=torch.zeros(1, nope + v_dim, rank), v_dim=v_dim)
    assert parts.min_expanded == minimum


@pytest.mark.parametrize(
    ("tile_rows", "heads"), [(None, [8, 32, 32, 4]), (64, [8, 64, 64, 4]), (16, [8, 16, 16, 4])]
)
def test_head_tiles_fit_the_registers(tile_rows: int | None, heads: list[int]) -> None:
    tiles = {} if tile_rows is None else {"tile_rows": tile_rows}
    kinds = [latent_kind(num_heads, 512, torch.bfloat16, 64, **tiles) for num_heads in (8, 64, 128, 12)]
    assert [kind.num_heads // kind.num_kv_heads for kind in kinds] == heads
    if tile_rows is not None:
        assert [choose_tiles(kind, 16).block_rows for kind in kinds] == [tile_rows] * 4
    assert latent_kind(64, 512, torch.bfloat16, 64, batch_invariant=True).num_kv_heads == 4


@pytest.mark.parametrize(
    ("capability", "holds"), [((8, 0), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_tiles_of_64_rows_are_for_gpus_whose_products_read_shared_memory(
    capability: tuple[int, int], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert latent._holds_tall_tiles.__wrapped__(torch.device("cuda")) == holds


def test_tall_tiles_equal_dense_attention() -> None:
    """Two tiles of 64 rows; contexts of one piece and of several, whose runs are added in parts."""
    torch.manual_seed(4)
    heads, rank, tail, keys, rows = 8, 512, 64, 300, 16
    kind = latent_kind(heads, rank, torch.float16, PAGE, tile_rows=64)
    q, q_tail, kv = (
        torch.randn(*shape, device=DEVICE).half() / 4
        for shape in ((rows, heads, rank), (rows, heads, tail), (-(-keys // PAGE), PAGE, 1, rank + tail))
    )
    pages = np.arange(len(kv))[None]
    batch = rows_from_host(np.array([keys - rows]), np.array([rows]), pages, PAGE, torch.device(DEVICE))
    k = kv.flatten(0, 2)[:keys].double()
    scores = torch.einsum("nqd,td->nqt", torch.cat((q, q_tail), -1).double(), k) * 0.1
    later = torch.arange(keys, device=DEVICE) > torch.arange(keys - rows, keys, device=DEVICE)[:, None]
    weights = scores.masked_fill(later[:, None], float("-inf")).softmax(-1)
    expected = torch.einsum("nqt,tf->nqf", weights, k[:, :rank]).flatten(1)
    for num_programs in (1, 64):
        work = list_work(kind, batch, AttentionWorkspace(rank, DEVICE, num_programs=num_programs))
        got = verify_attention(q, kv, kv, batch, work, 0.1, q_tail_NQC=q_tail)
        torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=1e-3)
