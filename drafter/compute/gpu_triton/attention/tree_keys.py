"""Keys of draft trees in `key_tiles.py`'s loop: which of its request's own rows a row sees.

By default a tile of keys is read once for all rows, and a row's ancestors are selected in it. Sums then
depend on where a path's rows lie.

In batch-invariant mode they must not: tiles with a tree's rows are read once for each token, with its path's
keys at the places of their depths. Other tokens see nothing in such a tile, which changes no bit of theirs. A
row's sums are those of its path as a chain.

`tree` is whether the request is one, pointers to its paths and positions, a path's stride, the position of
the first row, the tile's first token and their number; and of the tile's rows token [R] and whether real [R].
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_own_tile(tree, lo, hi, BLOCK_KEYS: tl.constexpr):
    """Return the first tile with rows of a tree; `hi` for a chain."""
    is_tree, first = tree[0], tree[4]
    return tl.where(is_tree, tl.minimum(tl.maximum(first // BLOCK_KEYS, lo), hi), hi)


@triton.jit
def own_end(tree, token, hi, BLOCK_KEYS: tl.constexpr):
    """Return the end of the tiles with a token's path."""
    is_tree, positions_ptr = tree[0], tree[2]
    position = tl.load(positions_ptr + token, mask=is_tree, other=0).to(tl.int32)
    return tl.where(is_tree, tl.minimum(hi, position // BLOCK_KEYS + 1), hi)


@triton.jit
def path_keys(tree, token, key_T, read_T, there_T):
    """Return where a token's keys are read, and which there are."""
    _, paths_ptr, _, depth, first, _, _, _, _ = tree
    nth_T = key_T - first
    own_T = tl.load(paths_ptr + token * depth + nth_T, mask=(nth_T >= 0) & (nth_T < depth), other=-1)
    return tl.where(own_T >= 0, first + own_T, read_T), there_T & ((nth_T < 0) | (own_T >= 0))


@triton.jit
def ancestor_keys(tree, key_T, there_T, BLOCK_KEYS: tl.constexpr):
    """Return a tile's keys' positions, and whether each row has each in its path, or before."""
    _, paths_ptr, positions_ptr, depth, first, _, _, token_R, real_R = tree
    begin = tl.min(key_T, 0)
    bits_R = tl.zeros([token_R.shape[0]], tl.int64)  # a bit for each key: a mask [R, T] would take registers
    for d in range(depth):
        own_R = tl.load(paths_ptr + token_R * depth + d, mask=real_R, other=-1)
        at_R = first + own_R - begin
        inside_R = (own_R >= 0) & (at_R >= 0) & (at_R < BLOCK_KEYS)
        bits_R |= tl.where(inside_R, 1, 0).to(tl.int64) << tl.where(inside_R, at_R, 0).to(tl.int64)
    nth_T = key_T - first
    own_T = (nth_T >= 0) & there_T
    position_T = tl.load(positions_ptr + nth_T, mask=own_T, other=0).to(tl.int32)
    bit_RT = (bits_R[:, None] >> (key_T - begin).to(tl.int64)[None, :]) & 1
    return tl.where(own_T, position_T, key_T), (nth_T < 0)[None, :] | (bit_RT != 0)
