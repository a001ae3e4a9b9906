"""Triton version of `drafter/step/inputs/logits_processors.py`, in one launch over rows and columns.

No counts are stored: each program counts, in a histogram of its columns, the tokens before its row in the
token table, drafts included. So the result does not depend on when or by which step a token was written, and
the host, which may not know it yet, is not involved. Called by `sampler.py` in steps in which any request has
filters or rules; programs of rows without rules return at once.

Differences from PyTorch: logits below fp32 are rounded to their dtype after the rules, and a product and a
sum may be fused.

Legend: N rows, V columns of the logits.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..inputs.row_layout import SlotTables
from .sampling_metadata import RuleTables

_TILE = tl.constexpr(1024)  # tokens counted per iteration
_CHUNK = 1024  # columns per program


def apply_rules(
    logits_NV: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    rules: RuleTables,
    tables: SlotTables,
    *,
    drafts: bool,
    ahead: int = 0,
    paths_ND: Tensor | None = None,
) -> None:
    """Edit the logits in place.

    Args:
        logits_NV: any float dtype, columns contiguous, the whole vocabulary.
        slots_N: int32; -1 is padding.
        positions_N: position of the token to sample, less `ahead`; the row sees all tokens before it.
        drafts: the rows propose drafts, which see only the known tokens.
        paths_ND: int32, of rows of draft trees (`TreeRows`): a row sees the tokens of its path.
    """
    num_rows, vocab_size = logits_NV.shape
    _apply[triton.cdiv(vocab_size, _CHUNK), num_rows](
        logits_NV, logits_NV.stride(0), slots_N, positions_N, tables.token_ids, tables.token_ids.stride(0),
        tables.num_computed, tables.token_ids if paths_ND is None else paths_ND,
        0 if paths_ND is None else paths_ND.shape[1], rules.is_ruled, rules.prompt_length, rules.num_allowed,
        rules.num_biased, rules.num_bad_words, rules.repetition, rules.frequency, rules.presence,
        rules.budget, rules.start_length, rules.end_length, rules.allowed_ids, rules.biased_ids, rules.biases,
        rules.bad_words, rules.marks, vocab_size,
        DRAFTS=drafts, AHEAD=ahead, MAX_ALLOWED=rules.allowed_ids.shape[1],
        MAX_BIASED=rules.biased_ids.shape[1], MAX_WORDS=rules.bad_words.shape[1],
        WORD=rules.bad_words.shape[2], MARK=rules.marks.shape[2], CHUNK=_CHUNK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["positions", "slots"])
def _apply(
    logits, row_stride, slots, positions, token_ids, tokens_stride, num_computed, paths, depth, is_ruled,
    prompt_lengths, nums_allowed, nums_biased, nums_bad_words, repetitions, frequencies, presences, budgets,
    start_lengths, end_lengths, allowed_ids, biased_ids, biases, bad_words, marks, vocab_size,
    DRAFTS: tl.constexpr, AHEAD: tl.constexpr, MAX_ALLOWED: tl.constexpr, MAX_BIASED: tl.constexpr,
    MAX_WORDS: tl.constexpr, WORD: tl.constexpr, MARK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first, row = tl.program_id(0) * CHUNK, tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if tl.load(is_ruled + slot) == 0:
        return
    columns = first + tl.arange(0, CHUNK)
    places = logits + row.to(tl.int64) * row_stride + columns
    z = tl.load(places, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
    is_broken = (z != z) | (z == float("inf"))
    anchor = tl.load(num_computed + slot)
    end = anchor + 1 if DRAFTS else tl.load(positions + row).to(tl.int32) + AHEAD
    tokens = (token_ids + slot.to(tl.int64) * tokens_stride, paths + row * depth, anchor, depth)
    prompt_length = tl.load(prompt_lengths + slot)

    num_allowed = tl.load(nums_allowed + slot)
    if num_allowed > 0:
        allowed = (allowed_ids + slot * MAX_ALLOWED, paths, 0, 0)
        hits = _count(allowed, 0, num_allowed, first, CHUNK)
        z = tl.where(hits > 0, z, -float("inf"))
    num_words = tl.load(nums_bad_words + slot)
    if num_words > 0:
        words = bad_words + slot * MAX_WORDS * WORD
        hits = _endings(words, num_words, tokens, prompt_length, end, first, MAX_WORDS, WORD, CHUNK)
        z = tl.where(hits > 0, -float("inf"), z)
    for i in range(0, tl.load(nums_biased + slot)):
        place = slot * MAX_BIASED + i
        z = tl.where(columns == tl.load(biased_ids + place), z + tl.load(biases + place), z)

    repetition, frequency = tl.load(repetitions + slot), tl.load(frequencies + slot)
    presence = tl.load(presences + slot)
    if repetition != 1.0:
        seen = _count(tokens, 0, end, first, CHUNK)
        z = tl.where(seen > 0, tl.where(z > 0, tl.math.div_rn(z, repetition), z * repetition), z)
    if (frequency != 0.0) | (presence != 0.0):
        counts = _count(tokens, prompt_length, end, first, CHUNK)
        z = z - frequency * counts.to(tl.float32)
        z = z - presence * (counts > 0).to(tl.float32)
    if tl.load(end_lengths + slot) > 0:
        spans = (tl.load(start_lengths + slot), tl.load(end_lengths + slot), tl.load(budgets + slot))
        forced = _forced(tokens, prompt_length, end, marks + slot * 2 * MARK, spans, MARK)
        z = tl.where(forced < 0, z, tl.where(columns == forced, 0.0, -float("inf")))
    z = tl.where(is_broken, float("nan"), z)  # rules must not hide it from the sampler's check
    tl.store(places, z.to(logits.dtype.element_ty), mask=columns < vocab_size)


@triton.jit
def _count(tokens, begin, end, first, CHUNK: tl.constexpr):
    """Return how often each column's token occurs in tokens[begin:end], int32 [CHUNK].

    Args:
        tokens: (pointer to ids, to a row's path, the anchor's position, most rows of a path or 0).
    """
    counts = tl.zeros([CHUNK], tl.int32)
    for start in range(begin, end, _TILE):
        at = start + tl.arange(0, _TILE)
        counts += _histogram(_read(tokens, at, at < end, -1), first, CHUNK)
    return counts


@triton.jit
def _read(tokens, at, mask, other):
    """Return the tokens at positions of a row's sequence: those after the anchor's are of its path."""
    ids, path, anchor, depth = tokens
    nth = at - anchor
    is_own = mask & (nth > 0) & (nth < depth)
    at = tl.where(is_own, anchor + tl.load(path + nth, mask=is_own, other=0), at)
    return tl.load(ids + at, mask=mask, other=other)


@triton.jit
def _endings(
    words, num_words, tokens, prompt_length, end, first,
    MAX_WORDS: tl.constexpr, WORD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return how many bad words of generated tokens each column's token would complete at `end`."""
    word = tl.arange(0, MAX_WORDS)
    is_word = word < num_words
    ends = is_word
    for back in range(1, WORD):
        wanted = tl.load(words + word * WORD + WORD - 1 - back, mask=is_word, other=-1)
        is_generated = end - back >= prompt_length
        token = _read(tokens, end - back, is_generated, -2)
        ends = ends & ((wanted < 0) | (wanted == token))
    last = tl.load(words + word * WORD + WORD - 1, mask=ends, other=-1)
    return _histogram(last, first, CHUNK)


@triton.jit
def _forced(tokens, prompt_length, end, marks, spans, MARK: tl.constexpr):
    """Return the token that must come next to end reasoning; -1 if unconstrained.

    See `drafter/step/sampling/logits_processor_states.py`.
    """
    start_length, end_length, budget = spans
    begin = prompt_length
    if start_length > 0:
        begin = _after_last(tokens, 0, end, marks, start_length)
    token = -1
    if (begin >= 0) & (end - begin >= budget):
        place = _after_last(tokens, begin, end, marks + MARK, end_length)
        if place < 0:
            num_matched = 0  # tokens of the end mark already present
            for length in range(1, end_length):
                fits = end - begin >= length
                for i in range(0, length):
                    seen = _read(tokens, end - length + i, fits, -1)
                    fits = fits & (seen == tl.load(marks + MARK + i))
                num_matched = tl.where(fits, length, num_matched)
            token = tl.load(marks + MARK + num_matched)
    return token


@triton.jit
def _after_last(tokens, begin, end, mark, length):
    """Return the position after the last occurrence of a mark in tokens[begin:end]; -1 if there is none."""
    found = tl.full([_TILE], -1, tl.int32)
    for start in range(begin, end, _TILE):
        at = start + tl.arange(0, _TILE)  # position of the mark's last token
        is_mark = (at < end) & (at - begin >= length - 1)
        for i in range(0, length):
            seen = _read(tokens, at - length + 1 + i, is_mark, -1)
            is_mark = is_mark & (seen == tl.load(mark + i))
        found = tl.maximum(found, tl.where(is_mark, at + 1, -1))
    return tl.max(found, 0)


@triton.jit
def _histogram(tokens, first, CHUNK: tl.constexpr):
    """Return how often each column's token occurs among these; negative ids are ignored."""
    is_here = (tokens >= first) & (tokens < first + CHUNK)
    return tl.histogram(tl.where(is_here, tokens - first, 0), CHUNK, mask=is_here)
