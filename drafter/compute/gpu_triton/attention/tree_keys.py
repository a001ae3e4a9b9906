"""Keys of draft trees in `key_tiles.py`'s loop: which of its request's own rows a row sees.

By default a tile of keys is read once for all rows, and a row's ancestors are selected in it: a row sees the
own row j if its path has j at j's depth. Sums then depend on where a path's rows lie.

In batch-invariant mode they must not: tiles of the context are read once, and tiles with a tree's rows once
for each token of the tile, with its path's keys at the places of their depths. Other tokens see nothing in
such a step, which changes no bit of theirs. A row's sums are those of its path as a chain.

`tree` is whether the request is one, pointers to its paths and positions, a path's stride, the position of
the first row, the tile's first token and their number; and of the tile's rows token [R] and whether real [R].
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def path_steps(tree, position_R, lo, hi, BLOCK_KEYS: tl.constexpr):
    """Return the first tile with a tree's keys, and the end of steps from `lo` on."""
    is_tree, _, _, _, first, _, tokens, _, _ = tree
    hi = tl.where(is_tree, tl.minimum(hi, tl.max(position_R, 0) // BLOCK_KEYS + 1), hi)
    shared = tl.where(is_tree, tl.minimum(tl.maximum(first // BLOCK_KEYS, lo), hi), hi)
    return shared, shared + (hi - shared) * tokens


@triton.jit
def tile_of_step(tree, step, shared):
    """Return a step's tile of keys, and the token for which it is from `shared` on."""
    _, _, _, _, _, first_token, tokens, _, _ = tree
    nth = tl.maximum(step - shared, 0)
    return tl.minimum(step, shared) + nth // tokens, first_token + nth % tokens


@triton.jit
def path_keys(tree, token, key_T, read_T, there_T, in_context):
    """Return where a token's keys are read, and which there are."""
    _, paths_ptr, _, depth, first, _, _, _, _ = tree
    nth_T = key_T - first
    has_T = (nth_T >= 0) & (nth_T < depth) & (in_context == 0)
    own_T = tl.load(paths_ptr + token * depth + nth_T, mask=has_T, other=-1)
    return tl.where(own_T >= 0, first + own_T, read_T), there_T & (in_context | (nth_T < 0) | (own_T >= 0))


@triton.jit
def ancestor_keys(tree, key_T, there_T):
    """Return the keys' positions, and whether each row has each in its path, or before."""
    is_tree, paths_ptr, positions_ptr, depth, first, _, _, token_R, real_R = tree
    nth_T = key_T - first
    own_T = is_tree & (nth_T >= 0) & there_T
    depth_T = tl.load(positions_ptr + nth_T, mask=own_T, other=0).to(tl.int32) - first
    at_RT = token_R[:, None] * depth + depth_T[None, :]
    found_RT = tl.load(paths_ptr + at_RT, mask=real_R[:, None] & own_T[None, :], other=-1)
    key_T = tl.where(own_T, first + depth_T, key_T)
    return key_T, (own_T == 0)[None, :] | (found_RT == nth_T[None, :])
