"""Keyed noise and sampling of tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from manta.drafter.step.inputs.gumbel_noise import (
    FACTOR_2,
    GREATEST_NEGATIVE,
    negative_gumbel,
    noise_bits,
    noise_keys,
)
from manta.drafter.step.sampling.sampler import sample_rows, sample_with_margins
from manta.drafter.step.sampling.step_ops import StepOperators
from manta.drafter.step.sampling.top_k_top_p import filter_logits
from support.oracles import oracle_dflash as oracle
from support.oracles.sampling_rows import NEUTRAL, batch, chi_square_p


def uniforms(seeds, positions, vocab: int) -> np.ndarray:
    keys = noise_keys(np.asarray(seeds, dtype=np.int64), np.asarray(positions, dtype=np.int64))
    bits = noise_bits(torch.from_numpy(keys)[:, :, None], vocab)
    return (bits.double().numpy() + 0.5) / 2**32


def margin(z: torch.Tensor, kept: torch.Tensor, noise: torch.Tensor) -> float:
    """Return the token and margin of one row in fp64, by sorting z + noise (z if one token is kept)."""
    scores = torch.where(kept, z + noise, -math.inf) if kept.sum() > 1 else z
    best, second = scores.sort(descending=True).values[:2].tolist()
    return best - second if best > -math.inf else 0.0


def test_noise_bits_equal_the_same_hash_in_python_integers():
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345], [0, 1, 7, 4095, 131071, 2]
    keys = noise_keys(np.array(seeds, dtype=np.int64), np.array(positions, dtype=np.int64))
    bits = noise_bits(torch.from_numpy(keys)[:, :, None], 40)
    expected = [
        [oracle.noise_bits(s, p, v) for v in range(40)] for s, p in zip(seeds, positions, strict=True)
    ]
    assert bits.tolist() == expected


def test_noise_is_gumbel_and_finite_everywhere():
    keys = torch.from_numpy(noise_keys(np.array([5]), np.array([9])))[:, :, None]
    expected = oracle.gumbel(5, 9, 3000)
    assert torch.allclose(-negative_gumbel(keys, 3000).double()[0], expected, rtol=2e-5, atol=2e-5)
    many = torch.from_numpy(noise_keys(np.arange(200), np.arange(200)))[:, :, None]
    noise = negative_gumbel(many, 5000)
    assert noise.isfinite().all() and float(noise.max()) <= GREATEST_NEGATIVE


@pytest.mark.parametrize("below", [0, 127, 128], ids="the largest but {}".format)
def test_the_largest_hashes_give_the_smallest_finite_noise(below: int):
    """Their uniform numbers round to 1, whose noise would be minus infinity, or are next to it."""
    wanted = 2**32 - 1 - below
    unmixed = wanted ^ wanted >> 15 ^ wanted >> 30
    # The hash is a bijection: this key leads to the wanted bits for token 0.
    key = unmixed * pow(FACTOR_2, -1, 2**32) % 2**32
    keys = torch.tensor([0, key])[:, None, None]
    assert noise_bits(keys, 1).tolist() == [[wanted]]
    noise = negative_gumbel(keys, 1).item()
    assert noise <= GREATEST_NEGATIVE and math.isclose(noise, GREATEST_NEGATIVE, abs_tol=1.0)
    assert below > 0 or math.isclose(noise, GREATEST_NEGATIVE, abs_tol=1e-3)


def test_uniforms_are_uniform_over_tokens_positions_and_seeds():
    over_tokens = uniforms([3], [17], 200_000)[0]
    over_positions = uniforms([3] * 20_000, range(20_000), 3).ravel()
    over_seeds = uniforms(range(20_000), [17] * 20_000, 3).ravel()
    for sample in (over_tokens, over_positions, over_seeds):
        counts, _ = np.histogram(sample, bins=256, range=(0, 1))
        assert 1e-4 < chi_square_p(counts, np.full(256, len(sample) / 256)) < 1 - 1e-4


@pytest.mark.parametrize("step", [1, 2, 16, 2**20])
def test_noise_at_different_positions_seeds_and_tokens_is_uncorrelated(step: int):
    base = uniforms([11] * 64, range(64), 2000)
    shifted = {
        "positions": uniforms([11] * 64, range(step, 64 + step), 2000),
        "seeds": uniforms([11 + step] * 64, range(64), 2000),
        "high seed bits": uniforms([11 + (step << 33)] * 64, range(64), 2000),
    }
    if step < 2000:
        shifted["tokens"] = np.roll(base, step % 2000, axis=1)
    for name, other in shifted.items():
        r = np.corrcoef(base.ravel(), other.ravel())[0, 1]
        assert abs(r) < 5 / math.sqrt(base.size), (name, r)


def test_no_row_repeats_the_noise_of_another_in_any_order():
    rows = uniforms([1] * 40 + [2] * 40, [*range(40), *range(40)], 3000)
    values, counts = np.unique(rows, return_counts=True)
    # 120,000 draws of 2^32 values: about 1.7 chance repeats.
    assert len(values) > rows.size - 12 and counts.max() == 2


def test_sampling_follows_softmax_over_positions():
    generator = torch.Generator().manual_seed(0)
    z, draws = torch.randn(12, generator=generator) * 1.5, 40_000
    for temperature in (0.7, 1.0, 1.8):
        ids = sample_rows(z.repeat(draws, 1), batch(draws, temperature=temperature, position=range(draws)))
        expected = (z / temperature).softmax(0).double().numpy() * draws
        assert chi_square_p(np.bincount(ids.numpy(), minlength=12), expected) > 1e-4


def test_tokens_of_neighboring_positions_are_independent():
    draws, z = 40_000, torch.tensor([0.3, -0.5, 0.9, 0.0])
    ids = sample_rows(z.repeat(draws, 1), batch(draws, position=range(draws))).numpy()
    p = z.softmax(0).double().numpy()
    pairs = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16)
    assert chi_square_p(pairs, np.outer(p, p).ravel() * (draws - 1)) > 1e-4


def test_a_filtered_distribution_is_renormalized():
    draws, z = 30_000, torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -2.0])
    ids = sample_rows(z.repeat(draws, 1), batch(draws, top_k=3, position=range(draws))).numpy()
    counts = np.bincount(ids, minlength=6)
    assert counts[3:].sum() == 0
    assert chi_square_p(counts[:3], z[:3].softmax(0).double().numpy() * draws) > 1e-4


def test_a_row_gets_the_same_token_alone_and_in_any_batch():
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(6, 500, generator=generator) * 2
    settings = {
        "temperature": [0.0, 1.0, 0.8, 0.0, 1.3, 1.0],
        "top_k": [0, 0, 20, 5, 0, 1],
        "top_p": [1.0, 0.9, 0.8, 0.5, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.1, 0.0, 0.05, 0.0],
        "seed": [1, 2, 3, 4, 5, 6],
        "position": [10, 11, 12, 13, 14, 15],
    }
    together = sample_rows(z.clone(), batch(6, **settings))
    for i in range(6):
        alone = sample_rows(z[i : i + 1].clone(), batch(1, **{k: v[i] for k, v in settings.items()}))
        assert alone[0] == together[i]
    assert together[0] == z[0].argmax() and together[3] == z[3].argmax() and together[5] == z[5].argmax()


def kept(logits: torch.Tensor, **settings) -> list[int]:
    out = filter_logits(logits[None].float(), batch(1, **settings))
    return out[0].isfinite().nonzero().ravel().tolist()


TIES, HALVES = torch.tensor([1.0, 3.0, 2.0, 0.0, 2.0]), torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
TENTHS, FALLING = torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), torch.tensor([0.5, 0.26, 0.14, 0.1]).log()
FILTERED = [
    # Top-k, with tokens that tie with the last.
    (TIES, {"top_k": 2}, [1, 2, 4]),
    (TIES, {"top_k": 4}, [0, 1, 2, 4]),
    (TIES, {"top_k": 99}, [0, 1, 2, 3, 4]),
    # The smallest set that reaches top-p, after temperature.
    (HALVES, {"top_p": 0.5}, [0]),
    (HALVES, {"top_p": 0.51}, [0, 1]),
    (HALVES, {"top_p": 0.75}, [0, 1]),
    (HALVES, {"top_p": 0.9001}, [0, 1, 2, 3]),
    (HALVES, {"top_p": 1e-6}, [0]),
    (HALVES * 2, {"top_p": 0.74, "temperature": 2.0}, [0, 1]),
    # Min-p, relative to the likeliest token.
    (FALLING, {"min_p": 0.5}, [0, 1]),
    (FALLING, {"min_p": 0.25}, [0, 1, 2]),
    (FALLING, {"min_p": 1.0}, [0]),
    # In the order min-p, top-k, top-p: among {0, 1} the first has 4/7 of the mass, of all four only 0.4.
    (TENTHS, {"top_p": 0.55}, [0, 1]),
    (TENTHS, {"top_p": 0.55, "top_k": 2}, [0]),
    (TENTHS, {"top_p": 0.55, "min_p": 0.7}, [0]),
]


@pytest.mark.parametrize(("logits", "settings", "tokens"), FILTERED, ids=[str(case[1]) for case in FILTERED])
def test_filters_keep_these_tokens(logits: torch.Tensor, settings: dict, tokens: list[int]):
    assert kept(logits, **settings) == tokens


def test_each_row_of_a_batch_keeps_its_own_top_k():
    z = torch.arange(20.0).repeat(4, 1)
    found = filter_logits(z, batch(4, top_k=[2, 7, 0, 3]))
    assert found.isfinite().sum(-1).tolist() == [2, 7, 20, 3]


def test_top_p_finds_nuclei_wider_than_its_first_look():
    z = torch.zeros(1000)
    z[::2] = 1.0
    assert len(kept(z, top_p=0.7)) == 500
    assert len(kept(torch.linspace(0, 0.1, 1000), top_p=0.9)) in range(895, 905)


def test_wide_and_narrow_nuclei_in_one_batch_are_independent():
    flat, peaked = torch.linspace(0, 0.1, 1000), torch.arange(1000.0, 0, -1)
    z, p = torch.stack((flat, peaked, flat, flat)), [0.9, 0.9, 1.0, 0.5]
    together = filter_logits(z, batch(4, top_p=p))
    for i in range(4):
        assert torch.equal(together[i], filter_logits(z[i : i + 1], batch(1, top_p=p[i]))[0])
    assert together.isfinite().sum(-1).tolist()[1:3] == [3, 1000]


@pytest.mark.parametrize(
    "settings", [{"temperature": 2.0, "top_k": 1}, {"temperature": 1e-5}], ids=["top-k of one", "near zero"]
)
def test_these_settings_are_greedy(settings: dict):
    z = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sample_rows(z.clone(), batch(50, position=range(50), **settings)), z.argmax(-1))


def test_greedy_ties_go_to_the_lowest_id():
    z = torch.zeros(3, 100)
    z[0, [40, 7, 90]] = 1.0
    z[1, [99, 98]] = 2.0
    assert sample_rows(z.clone(), batch(3, temperature=0.0)).tolist() == [7, 98, 0]
    assert sample_rows(z.bfloat16(), batch(3, temperature=0.0)).tolist() == [7, 98, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_chosen(temperature: float):
    z = torch.zeros(4, 8)
    z[:, 3] = 50.0
    pairs = [(0, 3), (2, 3), (2, 1)]
    ids = sample_rows(z, batch(4, temperature=temperature, position=range(4), forbidden=pairs))
    assert ids[0] != 3 and ids[2] not in (1, 3) and ids[1] == 3 and ids[3] == 3


def test_tokens_at_minus_infinity_are_never_chosen():
    z = torch.full((2000, 10), -math.inf)
    z[:, [2, 5]] = 0.0
    for settings in ({}, {"top_p": 0.99}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}):
        ids = sample_rows(z.clone(), batch(2000, position=range(2000), **settings))
        assert set(ids.tolist()) <= {2, 5}


def test_the_same_noise_couples_similar_distributions():
    """Coupling agrees at least as often as (1 - TV) / (1 + TV); independent draws would agree far less."""
    generator = torch.Generator().manual_seed(4)
    rows = 4000
    p = torch.randn(rows, 200, generator=generator) * 1.5
    q = p + torch.randn(rows, 200, generator=generator) * 0.5
    tv = (p.softmax(-1) - q.softmax(-1)).abs().sum(-1).div(2)
    same = sample_rows(p, batch(rows, position=range(rows))) == sample_rows(
        q, batch(rows, position=range(rows))
    )
    assert same.float().mean() > ((1 - tv) / (1 + tv)).mean() - 0.02


GREEDY = ("greedy", "top_k 1")
SETTINGS = {"greedy": {"temperature": 0.0}, "noise": {}, "top_k": {"top_k": 3}, "min_p": {"min_p": 0.3}}
SETTINGS |= {"top_k 1": {"top_k": 1}, "top_p": {"top_p": 0.4, "temperature": 0.6}}


@pytest.mark.parametrize("names", [[name] for name in SETTINGS] + [list(SETTINGS)], ids="+".join)
def test_a_margin_is_the_distance_to_the_second_best_kept_token(
    names: list[str], operators: StepOperators
) -> None:
    """The reference is fp64 over all of a row's tokens; some are forbidden, in one row all but one."""
    rows, vocab = 24, 301
    each = [names[row % len(names)] for row in range(rows)]
    knobs = {k: [SETTINGS[name].get(k, d) for name in each] for k, d in NEUTRAL.items()}
    pairs = [(row, token) for row in range(0, rows, 3) for token in (0, 7)]
    pairs += [(5, token) for token in range(1, vocab)]
    z = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    together = batch(rows, seed=4, position=range(rows), forbidden=pairs, **knobs)
    ids, margins = sample_with_margins(z.clone(), together, operators)
    assert ids.tolist() == sample_rows(z.clone(), together, operators).tolist()
    z[tuple(torch.tensor(pairs).T)] = -math.inf
    for row, name in enumerate(each):
        alone = batch(1, position=row, **SETTINGS[name])
        kept = filter_logits(z[row : row + 1], alone)[0] if alone.narrows else z[row]
        noise = oracle.gumbel(4, row, vocab) * (knobs["temperature"][row] if name not in GREEDY else 0)
        expected = margin(z[row].double(), kept > -math.inf, noise)
        assert margins[row] == pytest.approx(expected, abs=2e-4), (row, name)
    assert margins[5] == math.inf
