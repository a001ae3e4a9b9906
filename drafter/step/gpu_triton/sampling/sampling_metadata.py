"""Sampling parameters of request slots on the device, the kernels' accessors, and the noise of a seed.

Used by `sampler.py` and `top_k_top_p.py`. Both tables are written at admission.

The logits rules have tables of their own: `drafter/step/inputs/logits_processors.py` defines the rules;
`logits_processors.py` in this folder reads the tables. The tokens that a row has seen are read from the token
table. Owned by `drafter/step/gpu_triton/request_states.py`.

The noise is a version of `drafter/step/inputs/gumbel_noise.py`: the same integers, and precise logarithms. A
GPU's fast logarithm is imprecise near 1, where the winning noise lies; so log is a polynomial, within about
one unit in the last place everywhere.

Legend: S slots, F stop tokens of a request, A allowed tokens at most, B biased ones, W bad words, L tokens of
one; M tokens of a reasoning mark.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .....cluster.request.request import LogitsProcessorParams
from .....cluster.step.executor import RuleLimits
from ...inputs.gumbel_noise import CHAINS, FACTOR_1, FACTOR_2
from ..inputs.row_layout import Ints, SlotTables
from ..inputs.transfers import Arena

_FACTOR_A, _FACTOR_B = tl.constexpr(FACTOR_1), tl.constexpr(FACTOR_2)
_CHAIN_0, _CHAIN_1 = tl.constexpr(CHAINS[0]), tl.constexpr(CHAINS[1])


@dataclass(frozen=True, slots=True)
class DeviceSamplingMetadata:
    """Sampling parameters of each request slot: tensors [slots] on the device.

    Attributes:
        temperature, top_p, min_p: fp32. Temperature 0: greedy.
        top_k: int32; 0 or less keeps all, 1 is greedy.
        seed: int64, the noise key.
        min_length: int32; no stop token at positions below it.
        stop_ids: int32 [slots, F]; the list ends at the first -1.
        rules, tables: logits rules, and the tokens that they read; None without rules.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    min_length: Tensor
    stop_ids: Tensor
    rules: RuleTables | None = None
    tables: SlotTables | None = None


@triton.jit
def read_temperature(slot, temperatures, top_ks):
    """Return a slot's temperature; 0 if it is greedy."""
    return tl.where(tl.load(top_ks + slot) == 1, 0.0, tl.load(temperatures + slot))


@triton.jit
def read_filters(slot, temperature, top_ks, top_ps, min_ps):
    """Return (top-k, top-p, min-p) of a slot; neutral (0, 1, 0) if it is greedy."""
    is_noisy = temperature > 0
    top_k = tl.where(is_noisy, tl.load(top_ks + slot), 0)
    top_p = tl.where(is_noisy, tl.load(top_ps + slot), 1.0)
    return top_k, top_p, tl.where(is_noisy, tl.load(min_ps + slot), 0.0)


@triton.jit
def has_filters(filters):
    """Return whether (top-k, top-p, min-p) exclude anything."""
    top_k, top_p, min_p = filters
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


@triton.jit
def read_logits(logits_row, columns, vocab_start, NUM_STOP_IDS: tl.constexpr):
    """Load logits as `read_raw_logits`, with NaN replaced by -inf, which never wins."""
    z = read_raw_logits(logits_row, columns, vocab_start, NUM_STOP_IDS)
    return tl.where(z == z, z, -float("inf"))


@triton.jit
def read_raw_logits(logits_row, columns, vocab_start, NUM_STOP_IDS: tl.constexpr):
    """Load logits in fp32; -inf outside the row, and for stop tokens below the minimum length.

    Args:
        logits_row: (pointer to a row, V, pointer to its stop tokens, whether it is below the minimum
            length, temperature); passed on as one.
    """
    logits, vocab_size, stop_ids, is_early, _ = logits_row
    z = tl.load(logits + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
    if is_early:
        i, stop_id = 0, tl.load(stop_ids)
        while stop_id >= 0:  # loop over the actual ids: unrolled over capacity, 128 compares
            z = tl.where(columns + vocab_start == stop_id, -float("inf"), z)
            i += 1
            stop_id = tl.load(stop_ids + i, mask=i < NUM_STOP_IDS, other=-1)
    return z


RULE_LIMITS = RuleLimits(
    allowed_tokens=1024, biased_tokens=512, bad_words=256, bad_word_tokens=8, reasoning_tokens=16
)
_NUMBERS = {  # a value per slot
    "is_ruled": torch.int32,
    "prompt_length": torch.int32,
    "num_allowed": torch.int32,
    "num_biased": torch.int32,
    "num_bad_words": torch.int32,
    "repetition": torch.float32,
    "frequency": torch.float32,
    "presence": torch.float32,
    "budget": torch.int32,
    "start_length": torch.int32,
    "end_length": torch.int32,
}


@dataclass(frozen=True, slots=True)
class RuleTables:
    """Views of the arena; for a slot without rules only `is_ruled` is meaningful.

    Attributes:
        is_ruled, prompt_length, num_allowed, num_biased, num_bad_words: int32 [S]; `num_allowed` 0
            allows all tokens.
        repetition, frequency, presence: fp32 [S].
        allowed_ids: int32 [S, A].
        biased_ids, biases: int32 and fp32 [S, B].
        bad_words: int32 [S, W, L], right-aligned, padded with -1.
        budget, start_length, end_length: int32 [S]; `end_length` 0: reasoning has no limit.
        marks: int32 [S, 2, M], the start and the end mark of reasoning.
    """

    is_ruled: Tensor
    prompt_length: Tensor
    num_allowed: Tensor
    num_biased: Tensor
    num_bad_words: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    budget: Tensor
    start_length: Tensor
    end_length: Tensor
    allowed_ids: Tensor
    biased_ids: Tensor
    biases: Tensor
    bad_words: Tensor
    marks: Tensor

    @staticmethod
    def shapes(num_slots: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the arena's tables."""
        maximum = RULE_LIMITS
        return {
            **{name: ((num_slots,), dtype) for name, dtype in _NUMBERS.items()},
            "allowed_ids": ((num_slots, maximum.allowed_tokens), torch.int32),
            "biased_ids": ((num_slots, maximum.biased_tokens), torch.int32),
            "biases": ((num_slots, maximum.biased_tokens), torch.float32),
            "bad_words": ((num_slots, maximum.bad_words, maximum.bad_word_tokens), torch.int32),
            "marks": ((num_slots, 2, maximum.reasoning_tokens), torch.int32),
        }

    @classmethod
    def of(cls, arena: Arena) -> RuleTables:
        return cls(**{name: arena.tables[name] for name in cls.shapes(0)})


def rule_entries(arena: Arena, slot: int, rules: LogitsProcessorParams | None) -> list[tuple[Ints, Ints]]:
    """Return the arena entries that an admission writes; a request without rules writes one word."""
    if rules is None:
        return [arena.entries("is_ruled", (slot,), 0)]
    allowed, bad_words, thinking = rules.allowed_token_ids or (), rules.bad_words, rules.thinking
    start, end = ((), ()) if thinking is None else (thinking.start, thinking.end)
    numbers = {
        "is_ruled": 1,
        "prompt_length": rules.prompt_length,
        "num_allowed": len(allowed),
        "num_biased": len(rules.logit_bias),
        "num_bad_words": len(bad_words),
        "repetition": rules.repetition,
        "frequency": rules.frequency,
        "presence": rules.presence,
        "budget": 0 if thinking is None else thinking.budget,
        "start_length": len(start),
        "end_length": len(end),
    }
    found = [arena.entries(name, (slot,), value) for name, value in numbers.items()]
    biased_ids, biases = zip(*rules.logit_bias, strict=True) if rules.logit_bias else ((), ())
    lists = {"allowed_ids": allowed, "biased_ids": biased_ids, "biases": biases}
    found += [arena.entries(name, (slot, np.arange(len(x))), x) for name, x in lists.items() if x]
    for number, mark in enumerate((start, end)):
        if mark:
            found.append(arena.entries("marks", (slot, number, np.arange(len(mark))), mark))
    if bad_words:
        length = RULE_LIMITS.bad_word_tokens
        aligned = [(-1,) * (length - len(word)) + word for word in bad_words]
        places = (slot, np.arange(len(aligned))[:, None], np.arange(length))
        found.append(arena.entries("bad_words", places, aligned))
    return found


@triton.jit
def noise_keys(seed, position):
    """Return the two 32-bit keys of a row; unsigned products wrap to the definition's low bits."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    position = position.to(tl.uint32)
    key_0 = _mix(_mix(_mix(low ^ _CHAIN_0) ^ high) ^ position)
    key_1 = _mix(_mix(_mix(low ^ _CHAIN_1) ^ high) ^ position)
    return key_0, key_1


@triton.jit
def negative_gumbel(key_0, key_1, tokens):
    """Return log(E), E = -log(1 - u), u = (bits + 1/2) / 2^32, as the definition's `negative_gumbel`."""
    bits = _mix(tokens.to(tl.uint32)) ^ key_0
    bits = bits * _FACTOR_A
    bits = bits ^ (bits >> 15) ^ key_1
    bits = bits * _FACTOR_B
    bits = bits ^ (bits >> 15)
    minus_u = bits.to(tl.float32) * -(2.0**-32) - 2.0**-33
    minus_u = tl.maximum(minus_u, -1.0 + 2.0**-24)
    return log(-_log1p(minus_u))


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * _FACTOR_A
    x = x ^ (x >> 15)
    x = x * _FACTOR_B
    return x ^ (x >> 15)


@triton.jit
def log(x):
    """Return the natural logarithm of normal positive fp32 numbers."""
    fraction, exponent = _split(x)
    return _log_near_one(fraction - 1.0, exponent)


@triton.jit
def _log1p(x):
    """Return log(1 + x) for -1 < x <= 0, as precise near 0 as x itself."""
    fraction, exponent = _split(1.0 + x)
    return _log_near_one(tl.where(exponent == 0, x, fraction - 1.0), exponent)


@triton.jit
def _split(x):
    """Split x = fraction * 2^exponent, with sqrt(1/2) <= fraction < sqrt(2)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True), exponent


@triton.jit
def _log_near_one(f, exponent):
    """Return log(1 + f) + exponent * log(2), with the polynomial of Cephes' logf and log(2) in two parts."""
    p = 7.0376836292e-2
    p = p * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    e = exponent.to(tl.float32)
    rest = p * f * square - 2.12194440e-4 * e - 0.5 * square
    return f + rest + 0.693359375 * e
