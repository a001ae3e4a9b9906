"""The roofline gives the figures that were computed by hand for Qwen3-8B on an H200."""

from __future__ import annotations

import numpy as np
import pytest
from manta.cluster.errors import ConfigError
from manta.cluster.hardware.layer_shape import ExpertShape, LayerShape
from manta.cluster.hardware.model_shape import ModelShape
from manta.cluster.hardware.roofline import GPUS, Device, Roofline
from manta.cluster.speculation.acceptance_length import (
    check_survival,
    expected_acceptance_length,
    geometric_survival,
    mean_acceptance_length,
)

SHAPE = {"hidden": 4096, "inter": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 151936}
TARGET = ModelShape.dense(**SHAPE, layers=36)
DRAFTER = ModelShape.dense(**SHAPE, layers=5, taps=5)
H200 = Roofline(GPUS["NVIDIA H200"], TARGET, DRAFTER)
SURVIVAL = geometric_survival(0.8599, 15)  # acceptance length 6.5

# batch, context, plain, verify, draft and inject (ms), speed-up at 16 rows, best rows, speed-up there
TABLE = [
    (1, 1024, 3.56, 3.56, 0.78, 5.33, 16, 5.33),
    (8, 1024, 3.80, 3.81, 0.82, 5.34, 16, 5.34),
    (16, 1024, 4.08, 5.48, 1.16, 4.00, 11, 4.76),
    (32, 1024, 4.64, 10.95, 2.33, 2.27, 6, 3.41),
    (64, 1024, 5.77, 21.90, 4.66, 1.41, 4, 2.20),
    (128, 1024, 8.02, 43.80, 9.31, 0.98, 4, 1.53),
    (1, 8192, 3.80, 3.80, 0.82, 5.35, 16, 5.35),
    (32, 8192, 12.51, 18.82, 3.42, 3.66, 10, 3.93),
    (64, 8192, 21.50, 37.63, 6.84, 3.14, 10, 3.37),
]


def test_a_config_gives_the_model_its_known_size() -> None:
    assert pytest.approx(6.946e9, rel=1e-3) == TARGET.linear_params
    assert pytest.approx(0.622e9, rel=1e-3) == TARGET.head_params
    assert (TARGET.kv_bytes, DRAFTER.kv_bytes) == (144 * 1024, 20 * 1024)
    assert pytest.approx(1.05e9, rel=1e-2) == DRAFTER.linear_params + DRAFTER.fc_params
    assert H200.device.flops / H200.device.bytes_per_s == pytest.approx(184, abs=0.5)


@pytest.mark.parametrize("line", TABLE)
def test_floors_of_qwen3_8b_on_an_h200(
    line: tuple[int, int, float, float, float, float, int, float],
) -> None:
    batch, context, plain, verify, draft, speedup, best, best_speedup = line
    floor = H200.step(batch, 16, context)
    assert H200.verify_s(batch, 1, context) * 1e3 == pytest.approx(plain, abs=0.006)
    assert floor.verify_s * 1e3 == pytest.approx(verify, abs=0.006)
    assert (floor.draft_s + floor.inject_s) * 1e3 == pytest.approx(draft, abs=0.006)
    assert floor.step_s == floor.draft_s + floor.verify_s + floor.inject_s
    assert H200.speedup(batch, 16, context, SURVIVAL) == pytest.approx(speedup, abs=0.006)
    assert H200.best_rows(batch, context, SURVIVAL) == best
    assert H200.speedup(batch, best, context, SURVIVAL) == pytest.approx(best_speedup, abs=0.006)


def test_a_step_without_drafts_has_no_drafter_and_no_speedup() -> None:
    assert H200.draft_s(8, 1, 1024) == 0.0
    assert H200.speedup(8, 1, 1024, SURVIVAL) == 1.0
    assert H200.best_rows(8, 1024, (0.0,) * 15) == 1


def test_wider_elements_take_more_time_if_memory_bound() -> None:
    wide = Roofline(H200.device, ModelShape.dense(**SHAPE, layers=36, itemsize=4), DRAFTER)
    assert wide.verify_s(1, 1, 1024) == pytest.approx(2 * H200.verify_s(1, 1, 1024))


MXFP4, INT4 = 17 / 32, 18 / 32  # bytes of a weight: a scale of 8, or of 16 bits for 32 weights
# Layers with experts, hidden, I, E, k, bytes of a weight; distinct experts of 1, 8, 16 and 64 rows; GB read
EXPERTS = {
    "Qwen3-30B": (48, 2048, 768, 128, 8, 2, (8, 52, 82, 126), (3.6, 23, 37)),
    "gpt-oss-20b": (24, 2880, 2880, 32, 4, MXFP4, (4, 21, 28, 32), (1.3, 6.7, 9.0)),
    "gpt-oss-120b": (36, 2880, 2880, 128, 4, MXFP4, (4, 29, 51, 111), (1.9, 14, 24)),
    "Qwen3.5-35B": (40, 2048, 512, 256, 8, 2, (8, 57, 102, 222), (2.0, 14, 26)),
    "Kimi": (60, 7168, 2048, 384, 8, INT4, (8, 60, 110, 284), (12, 88, 163)),
}


def of_experts(
    layers: int, hidden: int, inter: int, count: int, chosen: int, weight_bytes: float, **more: int
) -> ModelShape:
    """Return a model of which experts are the largest part."""
    experts = ExpertShape(
        count=count, num_held=count, chosen=chosen, inter=inter, weight_bytes=weight_bytes, **more
    )
    layer = LayerShape(heads=4, kv_heads=2, head_dim=64, v_head_dim=64, experts=experts)
    return ModelShape(layers=(layer,) * layers, hidden=hidden, vocab=1000)


@pytest.mark.parametrize("name", EXPERTS)
def test_a_verify_reads_the_experts_that_its_rows_chose(name: str) -> None:
    *sizes, distinct, gigabytes = EXPERTS[name]
    model = of_experts(*sizes)
    ((experts, times),) = model.routed
    assert times == sizes[0]
    assert tuple(round(experts.distinct(rows)) for rows in (1, 8, 16, 64)) == distinct
    for rows, wanted in zip((1, 8, 16), gigabytes, strict=True):
        rounded = 0.05 if wanted < 10 else 0.5  # as the table above is
        assert model.experts(rows).num_bytes / 1e9 == pytest.approx(wanted, abs=rounded)
    assert model.experts(10_000).num_bytes == pytest.approx(model.expert_bytes)
    per_row = 2 * experts.chosen * model.expert_params(experts) * times
    assert model.experts(7).flop == pytest.approx(7 * per_row)


def test_few_rows_of_a_routed_target_cost_much_more_than_one() -> None:
    """Qwen3-30B has 2.5 GB that all rows share, so the benefit of drafts depends on the batch otherwise."""
    *sizes, _, _ = EXPERTS["Qwen3-30B"]

    def read_gb(rows: int) -> float:
        return 2.5 + of_experts(*sizes).experts(rows).num_bytes / 1e9

    costs = [read_gb(rows) / read_gb(1) for rows in (4, 8, 16)]
    assert costs == pytest.approx([2.6, 4.2, 6.5], abs=0.1)


@pytest.mark.parametrize("rows", [1, 4, 10, 20, 40, 80])
def test_ranks_with_whole_experts_wait_for_the_busiest(rows: int) -> None:
    """The oracle draws each row's experts of gpt-oss-120b over eight ranks."""
    (experts, _), draws = of_experts(36, 2880, 2880, 128, 4, MXFP4, inner_multiple=32).rank(8).routed[0], 400
    order = np.random.default_rng(rows).random((draws, rows, 128)).argsort(axis=2)
    is_chosen = np.zeros((draws, 128), dtype=bool)
    np.put_along_axis(is_chosen, order[:, :, :4].reshape(draws, -1), True, axis=1)
    largest = is_chosen.reshape(draws, 8, 16).sum(axis=2).max(axis=1).mean()
    assert experts.distinct(rows) == pytest.approx(largest, rel=0.04)
    assert experts.distinct(rows) > 16 * (1 - (1 - 4 / 128) ** rows)


def test_ranks_have_parts_of_all_experts_or_whole_ones() -> None:
    whole = of_experts(24, 2880, 2880, 32, 4, MXFP4, inner_multiple=32, shared_inter=64)
    split, by_expert = (whole.rank(ranks).routed[0][0] for ranks in (2, 4))
    assert (split.inter, split.num_held, split.shared_inter) == (1440, 32, 32)
    assert (by_expert.inter, by_expert.num_held, by_expert.shared_inter) == (2880, 8, 16), "90 blocks by 4"
    work, halves, quarters = (model.experts(16) for model in (whole, whole.rank(2), whole.rank(4)))
    assert (halves.num_bytes, halves.flop) == pytest.approx((work.num_bytes / 2, work.flop / 2))
    assert work.num_bytes / 4 < quarters.num_bytes < work.num_bytes / 3, "the busiest of the ranks"
    assert work.flop / 4 < quarters.flop < work.flop / 3
    for ranks in (2, 4):
        assert whole.rank(ranks).expert_bytes == pytest.approx(whole.expert_bytes / ranks)


def test_an_acceptance_length_counts_the_bonus_token_and_is_none_without_drafts() -> None:
    assert mean_acceptance_length(4, 6) == 2.5
    assert mean_acceptance_length(4, 0) == 1.0
    assert mean_acceptance_length(0, 0) is None


def test_an_expected_acceptance_length_counts_the_bonus_token() -> None:
    assert expected_acceptance_length((0.5, 0.25, 0.125), 3) == 1.75
    assert expected_acceptance_length((0.5,), 1) == 1.0
    assert expected_acceptance_length(SURVIVAL, 16) == pytest.approx(6.5, abs=0.005)


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (0.5,)])
def test_impossible_curves_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="2 probabilities"):
        check_survival(rates, 2, param="synthetic_acceptance_rates")
    check_survival((1.0, 1.0), 2, param="synthetic_acceptance_rates")


def test_device_rates_can_be_given() -> None:
    stated = Device.parse("CPU", "20.5,0.1")
    assert (stated.bytes_per_s, stated.flops) == (20.5e9, 0.1e12)
    for wrong in ("20", "fast,slow", "0,1", "1,2,3"):
        with pytest.raises(ConfigError, match="device_rates"):
            Device.parse("CPU", wrong)
