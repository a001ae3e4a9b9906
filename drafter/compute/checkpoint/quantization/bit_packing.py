"""Unpacks codes from 32-bit words: a little-endian stream of bits, the first code lowest.

32 codes of 3 bits fill three words; other codes never cross one. AWQ's words have another order (`awq.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def codes_per_block(bits: int) -> int:
    """Return the number of codes in the smallest run of words that holds whole codes."""
    return WORD_BITS // bits if WORD_BITS % bits == 0 else WORD_BITS


def words_per_block(bits: int) -> int:
    return 1 if WORD_BITS % bits == 0 else bits


def num_words(num_codes: int, bits: int) -> int:
    return -(-num_codes * bits // WORD_BITS)


def word_range(part: slice, bits: int) -> tuple[slice, int]:
    """Return the words that hold the codes of `part`, and the place of its first code in them."""
    codes, words = codes_per_block(bits), words_per_block(bits)
    first, last = part.start // codes, -(-part.stop // codes)
    return slice(first * words, last * words), part.start % codes


def unpack(words_RW: Tensor, bits: int) -> Tensor:
    """Return the codes along the last dimension, uint8 [R, W * 32 / bits], without their offset."""
    assert words_RW.dtype is torch.int32, "words of 32 bits"
    if bits in (4, 8):
        # A view as bytes needs a last stride of 1, which a single word need not have.
        bytes_RB = words_RW.contiguous().unsqueeze(-1).view(torch.uint8).flatten(-2)
        return bytes_RB if bits == 8 else torch.stack((bytes_RB & 0xF, bytes_RB >> 4), dim=-1).flatten(-2)
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
        return ((words_RW.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)
    return _unpack_crossing(words_RW, bits)


def _unpack_crossing(words_RW: Tensor, bits: int) -> Tensor:
    """Unpack codes of which some lie in two words, from the pair of words in which each begins."""
    missing = -words_RW.shape[-1] % bits
    words = torch.nn.functional.pad(words_RW.long() & 0xFFFFFFFF, (0, missing + 1))
    begins = torch.arange((words.shape[-1] - 1) * WORD_BITS // bits) * bits
    low, place = begins // WORD_BITS, begins % WORD_BITS
    pair = words[..., low] | (words[..., low + 1] << WORD_BITS)
    return ((pair >> place) & (2**bits - 1)).to(torch.uint8)
