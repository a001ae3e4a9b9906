"""A step's operators: compiled loops equal NumPy and PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.drafter.grammars.token_bitmasks import RowMasks
from manta.drafter.step.cpu_numba.step_ops import LOOPS
from manta.drafter.step.inputs.gumbel_noise import negative_gumbel, noise_keys
from manta.drafter.step.inputs.row_layout import RequestRows
from manta.drafter.step.sampling.ngram_lookup import look_up
from manta.drafter.step.sampling.step_ops import DEFINITION, StepOperators

BOTH: tuple[StepOperators, ...] = (DEFINITION, LOOPS)
SLOTS, MAX_LEN, PAGE_SIZE = 7, 40, 8


@dataclass
class Requests:
    """Rows and drafts of a few slots, as in a plan; random values follow from the seed."""

    slots_R: np.ndarray
    first_R: np.ndarray
    num_rows_R: np.ndarray
    counts_R: np.ndarray
    seed: int

    @property
    def num_drafts(self) -> int:
        return max(0, int(self.counts_R.max()) - 1)

    def tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, 1000, (SLOTS, MAX_LEN + 1), generator=generator)

    def few(self, *shape: int, low: int = 0) -> torch.Tensor:
        """Return few different values, so that there are ties."""
        return torch.from_numpy(np.random.default_rng(self.seed).integers(low, 3, shape))


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    first, rows, counts = [], [], []
    for _ in slots:
        rows.append(draw(st.integers(1, 9)))
        counts.append(draw(st.integers(0, rows[-1])))
        first.append(draw(st.integers(0, MAX_LEN - rows[-1])))
    arrays = [np.array(x, dtype=np.int64) for x in (slots, first, rows, counts)]
    return Requests(*arrays, seed=draw(st.integers(0, 2**20)))


def arrays(values: object) -> list[np.ndarray]:
    return [np.asarray(x) for x in values]  # type: ignore[attr-defined]


@settings(max_examples=100)
@given(requests(), st.integers(1, 3))
def test_rows_are_laid_out_the_same(r: Requests, num_groups: int) -> None:
    pages = np.random.default_rng(r.seed).integers(0, 99, (num_groups, SLOTS, MAX_LEN // PAGE_SIZE))
    where = (RequestRows(r.slots_R, r.first_R, r.num_rows_R, r.counts_R), pages, PAGE_SIZE)
    mine, loops = (arrays(operators.lay_out_rows(r.tokens(), *where)) for operators in BOTH)
    for expected, got in zip(mine, loops, strict=True):
        assert expected.dtype == got.dtype == np.int64 and expected.tolist() == got.tolist()


@settings(max_examples=100)
@given(requests())
def test_tokens_are_written_the_same(r: Requests) -> None:
    values = r.few(len(r.slots_R), int(r.num_rows_R.max()), low=-1)
    written = []
    for operators in BOTH:
        tokens = r.tokens()
        operators.write_tokens(tokens, r.slots_R, r.first_R, r.counts_R, values)
        written.append(tokens[:, :MAX_LEN])
    assert written[0].equal(written[1])


@settings(max_examples=100)
@given(requests(), st.integers(0, 2))
def test_values_are_scattered_to_requests_the_same(r: Requests, spare: int) -> None:
    values, counts = r.few(int(r.counts_R.sum())), torch.from_numpy(r.counts_R)
    mine, loops = (op.by_request(values, counts, r.num_drafts + 1 + spare) for op in BOTH)
    assert mine.dtype == loops.dtype and mine.equal(loops)
    assert [row[row >= 0].tolist() for row in mine] == [x.tolist() for x in values.split(r.counts_R.tolist())]
    floats = [op.by_request(values.float(), counts, mine.shape[1]) for op in BOTH]
    for got in floats:
        assert got.dtype == torch.float32 and got.nan_to_num(-1).equal(mine.float())


def logits_of(dtype: torch.dtype, vocab_size: int) -> torch.Tensor:
    """Return a non-contiguous view with ties, and rows with few or no allowed tokens."""
    logits = (3 * torch.randn(20, vocab_size + 3, generator=torch.Generator().manual_seed(3))).round(
        decimals=1
    )
    logits[3, : vocab_size // 2] = float("-inf")
    logits[4] = float("-inf")
    return logits.to(dtype)[:, :vocab_size]


def margins_of(scores: torch.Tensor) -> torch.Tensor:
    padded = torch.cat((scores, torch.full_like(scores[:, :1], float("-inf"))), dim=1)
    best, second = padded.sort(dim=1, descending=True).values[:, :2].unbind(1)
    return torch.where(best == second, 0.0, best - second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 333, 50_001])
def test_the_likeliest_token_is_the_same(vocab_size: int, dtype: torch.dtype) -> None:
    logits = logits_of(dtype, vocab_size)
    mine, loops = (operators.argmax_margin(logits) for operators in BOTH)
    assert all(x.dtype == y.dtype and x.equal(y) for x, y in zip(mine, loops, strict=True))
    assert mine[1].equal(margins_of(logits.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 333, 5_001])
def test_grammar_masks_are_applied_the_same(vocab_size: int, dtype: torch.dtype) -> None:
    logits, random = logits_of(dtype, vocab_size), np.random.default_rng(vocab_size)
    bits = random.integers(-(2**31), 2**31, (4, vocab_size // 32 + 2)).astype(np.int32)
    bits[3] = 0
    masks = RowMasks(np.array([0, 3, 4, 19]), bits, end_id=vocab_size // 2)
    mine, loops = (operators.mask_tokens(logits.clone(), masks) for operators in BOTH)
    assert mine.equal(loops)
    assert mine[19].argmax() == mine[4].argmax() == vocab_size // 2, "nothing is left: the end"
    assert mine[1].equal(logits[1]), "others stay"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, 333, 4_096, 50_001])
def test_a_sampled_token_is_the_same_except_at_ties(vocab_size: int, dtype: torch.dtype) -> None:
    """Noise differs by units in the last place: where tokens differ, their scores are as close."""
    logits, rows = logits_of(dtype, vocab_size), np.arange(20)
    temperature = torch.linspace(0.01, 3.0, 20).unsqueeze(1)
    keys = torch.from_numpy(noise_keys(rows * 7919, rows)).unsqueeze(-1)
    (mine, margins), (loops, loops_margins) = (
        operators.noisy_argmax_margin(logits, temperature, keys) for operators in BOTH
    )
    assert mine.dtype == loops.dtype and margins.dtype == loops_margins.dtype == torch.float32
    scores = logits.double() - temperature * negative_gumbel(keys, vocab_size).double()
    best, got = (scores.gather(1, ids.unsqueeze(1)).squeeze(1) for ids in (mine, loops))
    near = (best - got).abs() <= 1e-5 * (1 + best.abs())
    assert ((mine == loops) | near).all()
    assert (mine == loops).float().mean() >= 0.9
    for row in range(20):
        one = slice(row, row + 1)
        alone, _ = LOOPS.noisy_argmax_margin(logits[one], temperature[one], keys[:, one].contiguous())
        assert alone == loops[one], "a row's choice does not depend on the others"
    for got in (margins, loops_margins):
        torch.testing.assert_close(got.double(), margins_of(scores), atol=1e-4, rtol=1e-4)


def copied(known: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """Look up the prompt by definition, one position after the other."""
    for length in range(longest, shortest - 1, -1):
        for begin in range(len(known) - length - 1, -1, -1):
            if known[begin : begin + length] == known[len(known) - length :]:
                text, distance = list(known), len(known) - begin - length
                for _ in range(count):
                    text.append(text[-distance])
                return text[len(known) :]
    return [-1] * count


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(TEXTS, st.integers(0, 7)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_ngram_lookup_is_the_same(requests: list[tuple[list[int], int]], shortest: int, more: int) -> None:
    tokens, counts = torch.full((SLOTS, 41), 1), [count for _, count in requests]
    slots = np.arange(len(requests))[::-1].astype(np.int64)
    for slot, (text, _) in zip(slots.tolist(), requests, strict=True):
        tokens[slot, : len(text)] = torch.tensor(text)
    ends = np.array([len(text) for text, _ in requests])
    got = look_up(tokens, slots, ends, np.array(counts), shortest, shortest + more)
    assert got.dtype == torch.int64 and got.shape == (len(requests), max(counts))
    for row, (text, count) in zip(got.tolist(), requests, strict=True):
        expected = copied(text, count, shortest, shortest + more)
        assert row == expected + [-1] * (max(counts) - count)
