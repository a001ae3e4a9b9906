"""The roofline's arithmetic gives the figures that were worked out for Qwen3-8B on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manta.cluster.acceptance import expected_acceptance_length, mean_acceptance_length
from manta.cluster.errors import ConfigError
from manta.cluster.roofline import (
    GPUS,
    Dense,
    Device,
    Roofline,
    check_survival,
    geometric_survival,
)

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
TARGET = Dense.from_config({**SHAPE, "num_hidden_layers": 36})
DRAFTER = Dense.from_config(
    {**SHAPE, "num_hidden_layers": 5, "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}}
)
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
    assert H200.device.ridge_rows == pytest.approx(184, abs=0.5)


@pytest.mark.parametrize(
    ("batch", "context", "plain", "verify", "draft", "speedup", "best", "best_speedup"), TABLE
)
def test_floors_of_qwen3_8b_on_an_h200(
    batch: int,
    context: int,
    plain: float,
    verify: float,
    draft: float,
    speedup: float,
    best: int,
    best_speedup: float,
) -> None:
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


def test_wider_elements_take_more_time_where_memory_is_the_bound() -> None:
    wide = Roofline(H200.device, Dense.from_config({**SHAPE, "num_hidden_layers": 36}, 4), DRAFTER)
    assert wide.verify_s(1, 1, 1024) == pytest.approx(2 * H200.verify_s(1, 1, 1024))


def test_heads_that_a_config_leaves_out_are_derived() -> None:
    folder = Path(__file__).parent.parent / "models"
    shipped = Dense.from_config(json.loads((folder / "drafter" / "config.json").read_text()))
    assert (shipped.taps, shipped.head_dim, shipped.kv_heads) == (5, 64, 2)
    bare = {k: v for k, v in SHAPE.items() if k not in ("head_dim", "num_key_value_heads")}
    derived = Dense.from_config({**bare, "num_hidden_layers": 1})
    assert (derived.head_dim, derived.kv_heads, derived.taps) == (128, 32, 0)


def test_an_acceptance_length_counts_the_bonus_token_and_is_none_where_nothing_was_drafted() -> None:
    assert mean_acceptance_length(4, 6) == 2.5
    assert mean_acceptance_length(4, 0) == 1.0
    assert mean_acceptance_length(0, 0) is None


def test_an_expected_acceptance_length_counts_the_bonus_token() -> None:
    assert expected_acceptance_length((0.5, 0.25, 0.125), 3) == 1.75
    assert expected_acceptance_length((0.5,), 1) == 1.0
    assert expected_acceptance_length(SURVIVAL, 16) == pytest.approx(6.5, abs=0.005)


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (0.5,)])
def test_curves_that_cannot_be_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="2 probabilities"):
        check_survival(rates, 2, param="synthetic_acceptance_rates")
    check_survival((1.0, 1.0), 2, param="synthetic_acceptance_rates")


def test_rates_of_a_device_can_be_stated() -> None:
    stated = Device.parse("CPU", "20.5,0.1")
    assert (stated.bytes_per_s, stated.flops) == (20.5e9, 0.1e12)
    for wrong in ("20", "fast,slow", "0,1", "1,2,3"):
        with pytest.raises(ConfigError, match="device_rates"):
            Device.parse("CPU", wrong)
