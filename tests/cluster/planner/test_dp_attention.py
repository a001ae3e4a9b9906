"""The figures of docs/decisions/dp-attention-mla.md: data-parallel attention of a target with latents.

Ranks divide requests in attention and drafting, and weights in experts and the head. So a rank reads whole
attention weights, and latents and drafter context of its own requests only.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from manta.cluster.hardware.gpu_specs import GPUS, Gpu
from manta.cluster.hardware.layer_shape import DeviceWork
from manta.cluster.hardware.memory_estimate import MAX_NUM_SEQS, MemoryEstimate, estimate_memory
from manta.cluster.hardware.model_pair import LayoutDemand, ModelPair
from manta.cluster.hardware.model_shape import ModelShape
from manta.cluster.hardware.parallel_layouts import ParallelLayout
from manta.cluster.hardware.step_time import StepTimes
from support.paths import ROOT
from support.published.published import TARGETS, pair_of, published_spec

RANKS = 8
LAYOUT = ParallelLayout(RANKS, "colocated", 1)
PAGE = (ROOT / "docs/decisions/dp-attention-mla.md").read_text()
# Contexts of half to one and a half times the mean, evenly; the largest of eight normal numbers on average.
SPREAD_OF_CONTEXTS, LARGEST_OF_RANKS = 12**-0.5, 1.424


@pytest.fixture(scope="module")
def kimi() -> ModelPair:
    return pair_of(TARGETS["Kimi-K2.6"], published_spec("Kimi-K2.6"))


def attention_params(shape: ModelShape) -> int:
    without = (replace(layer, heads=0, kv_heads=0, latent=None) for layer in shape.layers)
    return shape.linear_params - sum(layer.dense_params(shape.hidden) for layer in without)


def busiest(batch: int) -> tuple[int, float]:
    """Return the requests of the busiest rank, and its mean context over that of all requests."""
    mine = -(-batch // RANKS)
    return mine, 1.0 + (batch > 1) * LARGEST_OF_RANKS * SPREAD_OF_CONTEXTS * mine**-0.5


def verify_s(pair: ModelPair, gpu: Gpu, batch: int, rows: int, context: float) -> float:
    """Return the seconds of the target's pass with data-parallel attention.

    The sums after attention and after experts become a gather of rows before experts and a scattered sum
    after them: as many messages, and half the bytes.
    """
    rank, tokens, (mine, longer) = pair.target.rank(RANKS), batch * rows, busiest(batch)
    whole_heads = tuple(
        replace(layer, heads=whole.heads)
        for layer, whole in zip(rank.layers, pair.target.layers, strict=True)
    )
    wide = replace(rank, layers=whole_heads)
    attention, shared = attention_params(wide), rank.linear_params - attention_params(rank)
    works = [
        DeviceWork(attention * 2, 2 * attention * mine * rows),
        DeviceWork(shared * 2, 2 * shared * tokens),
        rank.experts(tokens),
        rank.head(tokens + 1),
        wide.attention(mine, rows, longer * context),
    ]
    messages = 2 * rank.num_layers + 1
    link_s = messages * gpu.link.all_reduce_s(RANKS, tokens * rank.hidden * 2 / 2)
    launches_s = StepTimes(pair, gpu, LAYOUT).verify(batch, rows, context).launches
    issued_s = (max(gpu.device.seconds(work), gpu.issue_s(work.issued)) for work in works)
    return sum(issued_s) + link_s + launches_s


def round_ms(pair: ModelPair, gpu: Gpu, batch: int, rows: int, context: int, ways: str) -> float:
    """Return the milliseconds of a round; `ways` is "tp", "drafts" (only drafting is divided) or "dp"."""
    times, (mine, longer) = StepTimes(pair, gpu, LAYOUT), busiest(batch)
    verified_s = times.verify(batch, rows, context).total_s
    if ways == "dp":
        verified_s = verify_s(pair, gpu, batch, rows, context)
    drafted, length = (batch, context) if ways == "tp" else (mine, longer * context)
    draft_s = times.draft(drafted, rows, length).total_s if rows > 1 else 0.0
    return 1e3 * (verified_s + draft_s + times.inject(drafted * rows if rows > 1 else 0).total_s)


def memory(pair: ModelPair, gpu: Gpu, context: int) -> MemoryEstimate:
    return estimate_memory(pair, gpu, LAYOUT, LayoutDemand(max_model_len=131072, context=context))


def tokens_of_dp(pair: ModelPair, gpu: Gpu, context: int) -> int:
    """Return the tokens that ranks hold together if each has the pages of its own requests."""
    planned = memory(pair, gpu, context)
    rank, whole = pair.target.rank(RANKS), pair.target
    more = 2 * (attention_params(whole) - attention_params(rank))
    return RANKS * int((planned.kv_bytes - more) * planned.kv_tokens / planned.kv_bytes)


def numbers(cells: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[\d.,]*\d", cells)]


ROUNDS = re.findall(r"^\| (\w+), (\d+) \W (\d+)k, (\d) rows? \| (.*) \|$", PAGE, re.MULTILINE)
LIMITS = re.findall(r"^\| (\w+), (\d+)k of context \| (.*) \|$", PAGE, re.MULTILINE)


def test_the_page_has_both_tables() -> None:
    assert len(ROUNDS) >= 10 and len(LIMITS) == 4


@pytest.mark.parametrize("line", ROUNDS)
def test_documented_rounds_are_computed(kimi: ModelPair, line: tuple[str, ...]) -> None:
    gpu, (batch, thousands, rows) = GPUS[line[0].lower()], map(int, line[1:4])
    sizes = batch, rows, 1024 * thousands
    computed = [round_ms(kimi, gpu, *sizes, way) for way in ("tp", "drafts", "dp")]
    assert computed == pytest.approx(numbers(line[4]), rel=0.02), computed


@pytest.mark.parametrize("line", LIMITS)
def test_documented_throughput_at_the_limit_of_memory_is_computed(
    kimi: ModelPair, line: tuple[str, ...]
) -> None:
    """Blocks of eight rows a second, with as many requests as fit, but not above the planner's limit."""
    gpu, context = GPUS[line[0].lower()], 1024 * int(line[1])
    planned, tokens = memory(kimi, gpu, context), tokens_of_dp(kimi, gpu, context)
    held = planned.max_num_seqs, min(tokens // RANKS // context * RANKS, MAX_NUM_SEQS)
    rates = [
        1e3 * batch / round_ms(kimi, gpu, batch, 8, context, way)
        for batch, way in zip(held, ("tp", "dp"), strict=True)
    ]
    computed = [planned.kv_tokens / 1e6, tokens / 1e6, *held, *rates]
    assert computed == pytest.approx(numbers(line[2]), rel=0.02), computed


def test_verified_rows_make_latents_bound_by_arithmetic(kimi: ModelPair) -> None:
    """All heads of a rank share a latent's bytes: 967 operations a byte with 8 rows, 121 with an eighth."""
    device = GPUS["h200"].device
    for heads, intensity in ((64, 967), (8, 121)):
        layer = replace(kimi.target.layers[0], heads=heads)
        work = layer.attention(8, 1e6, 2)
        assert work.flop / work.num_bytes == pytest.approx(intensity, rel=0.01)
        assert (work.flop / device.flops > work.num_bytes / device.bytes_per_s) == (heads == 64)
