"""Instruction counts of kernels as a bound of a step: the counts of the compiled loops, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manta.cluster.hardware.gpu_specs import GPUS
from manta.cluster.hardware.kernel_loops import (
    ATTENTION,
    INT4_BYTES,
    ISSUE_SHARE,
    LATENTS,
    MXFP4,
    MXFP4_BYTES,
    NVFP4_BYTES,
    PRODUCTS,
    SHORT_LATENTS,
    WIDE_PRODUCTS,
    IssuedInstructions,
)
from manta.cluster.hardware.layer_shape import ExpertShape, LatentShape, LayerShape
from manta.cluster.hardware.model_pair import ModelPair
from manta.cluster.hardware.model_shape import ModelShape
from manta.cluster.hardware.parallel_layouts import ParallelLayout
from manta.cluster.hardware.step_time import LAUNCH_S, DeviceTime, StepTimes

EXPERTS = ExpertShape(count=128, chosen=4, inter=2880, num_held=128, weight_bytes=MXFP4_BYTES)
LAYER = LayerShape(heads=64, kv_heads=8, head_dim=64, v_head_dim=64, experts=EXPERTS)
GPT_OSS = ModelShape(layers=(LAYER,) * 36, hidden=2880, vocab=201088)
DENSE = ModelShape.dense(
    layers=36, hidden=4096, inter=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936
)


def verify(target: ModelShape, gpu: str = "b200", rows: float = 1, context: float = 1024) -> DeviceTime:
    pair = ModelPair(target=target, drafter=None, tied=False, tp_sizes=(1,), survival=())
    return StepTimes(pair, GPUS[gpu], ParallelLayout(1, None, 1)).verify(1, rows, context)


@pytest.mark.parametrize(
    ("gpu", "loop", "terabytes"),
    [
        ("h100", PRODUCTS[2], 20.0),
        ("h100", PRODUCTS[1], 5.7),
        ("h100", MXFP4[16], 5.0),
        ("h100", MXFP4[32], 4.7),
        ("h100", MXFP4[64], 4.7),
        ("h100", MXFP4[128], 3.2),
        ("h100", PRODUCTS[INT4_BYTES], 4.0),
        ("h100", PRODUCTS[NVFP4_BYTES], 2.7),
        ("b200", PRODUCTS[NVFP4_BYTES], 3.4),
        ("h100", WIDE_PRODUCTS[2], 7.7),
        ("b200", WIDE_PRODUCTS[2], 10.6),
        ("h100", WIDE_PRODUCTS[1], 2.9),
        ("h100", WIDE_PRODUCTS[INT4_BYTES], 2.5),
        ("h100", ATTENTION[2], 10.9),
        ("h100", ATTENTION[1], 4.5),
        ("b200", MXFP4[16], 7.5),
        ("b200", MXFP4[32], 4.8),
        ("b200", MXFP4[64], 3.2),
        ("b200", MXFP4[128], 2.6),
        ("b200", ATTENTION[2], 11.7),
        ("h100", LATENTS[2], 4.9),
        ("b200", LATENTS[2], 7.0),
        ("h100", LATENTS[1], 4.1),
        ("b200", LATENTS[1], 5.1),
        ("h100", SHORT_LATENTS, 8.7),
        ("b200", SHORT_LATENTS, 10.6),
    ],
)
def test_ceilings_are_those_of_the_documented_table(gpu: str, loop, terabytes: float) -> None:
    """docs/benchmarks/gpu.md has the rates at which all cycles issue."""
    seconds = ISSUE_SHARE * GPUS[gpu].issue_s(loop.read(1e12))
    assert 1 / seconds == pytest.approx(terabytes, abs=0.06)


def test_packed_experts_are_bound_by_instructions_where_memory_is_fast() -> None:
    wide = replace(GPT_OSS, layers=(replace(LAYER, experts=replace(EXPERTS, weight_bytes=2.0)),) * 36)
    issued_s = verify(GPT_OSS).instructions - verify(wide).instructions  # 16 bits are read more slowly
    assert issued_s == pytest.approx(GPUS["b200"].issue_s(GPT_OSS.experts(1).issued))
    assert issued_s > 1.3 * GPT_OSS.experts(1).num_bytes / GPUS["b200"].device.bytes_per_s
    assert verify(GPT_OSS).total_s < verify(wide).total_s


def test_more_rows_of_an_expert_than_a_tile_read_its_weights_again() -> None:
    few, tile, many = (GPT_OSS.experts(rows).issued.sm_100 for rows in (512, 4096, 8192))
    assert few < tile and many == pytest.approx(2 * tile)


def test_keys_and_values_of_one_byte_move_half_the_bytes_and_take_more_instructions() -> None:
    small = replace(DENSE, kv_itemsize=1)
    assert small.kv_bytes * 2 == DENSE.kv_bytes
    wide, narrow = (model.attention(8, 16, 8192) for model in (DENSE, small))
    assert narrow.num_bytes * 2 == wide.num_bytes and narrow.flop == wide.flop
    assert narrow.issued.sm_90 > wide.issued.sm_90
    assert verify(small, "h200", 16, 65536).total_s < verify(DENSE, "h200", 16, 65536).total_s


def test_every_tile_of_heads_reads_a_latent_again() -> None:
    """Kimi K2 on eight ranks: eight rows of eight heads are one tile."""
    parts = LatentShape(q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128, rank=512)
    layer = LayerShape(heads=8, kv_heads=1, head_dim=576, v_head_dim=512, latent=parts)
    plain, block, longer = (layer.attention(rows, 8192, 2) for rows in (1, 8, 16))
    per_key = [work.issued.times(576 * 2 / work.num_bytes) for work in (plain, block, longer)]
    assert [issued.sm_90 * 32 for issued in per_key] == pytest.approx([980, 2 * 867, 4 * 867])
    assert [issued.sm_100 * 32 for issued in per_key] == pytest.approx([996, 2 * 760, 4 * 760])
    packed = layer.attention(8, 8192, 1)
    assert packed.num_bytes * 2 == block.num_bytes
    assert packed.issued.sm_90 > 2 * block.issued.sm_90, "four tiles of 16 rows, which convert each"
    assert layer.prompt_attention(512, 8192, 2).issued == IssuedInstructions()


def test_rows_beyond_our_products_take_more_launches_and_codes_are_dequantized() -> None:
    """A gate and two norms more per layer; of codes from 257 rows on, with a launch for each product."""
    wide = [verify(DENSE, rows=rows) for rows in (128, 129)]
    assert wide[1].launches - wide[0].launches == pytest.approx(3 * 36 * LAUNCH_S)
    packed = replace(DENSE, product_itemsize=INT4_BYTES)
    one, two, none = (packed.linears(rows).issued.sm_100 for rows in (65, 129, 257))
    assert (two, none) == (2 * one, 0.0)
    assert packed.linears(64).issued.sm_100 < one < 2 * packed.linears(64).issued.sm_100
    few, many = (verify(packed, rows=rows) for rows in (256, 257))
    assert many.launches - few.launches == pytest.approx((3 + 4) * 36 * LAUNCH_S)
    written = packed.linear_params * (INT4_BYTES + 2)
    assert many.bytes - few.bytes == pytest.approx(written / GPUS["b200"].device.bytes_per_s, rel=1e-3)
