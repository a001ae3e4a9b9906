"""Paths of draft trees: the rows of a request that a row of a step sees, in the order of their depths.

    row        0   1   2   3   4          paths_ND    0 -1 -1      a chain's rows: -1 -1 -1
    parent     -   0   0   1   1                           0  1 -1
                                                           0  2 -1
                                                           0  1  3
                                                           0  1  4

A row attends to its request's context and to the rows of its path, itself included, as if they were a chain:
row n is at position context length + depth, while its K and V are at slot context length + offset in the
request. A parent comes before its children. Rows of requests that are chains have -1 at depth 0.

Legend: N rows, D most rows of a path.
"""

from __future__ import annotations

import numpy as np

from .backend import Ints


def paths_of(parents: list[int] | Ints, depth: int) -> Ints:
    """Return a request's paths [rows, depth], int32, of the offset of each row's parent; -1 for the root."""
    paths = np.full((len(parents), depth), -1, dtype=np.int32)
    for row, parent in enumerate(parents):
        assert parent < row, "a parent comes before its children"
        above = paths[parent][paths[parent] >= 0] if parent >= 0 else paths[0, :0]
        paths[row, : len(above) + 1] = (*above, row)
    return paths


def positions_of(paths_ND: Ints, first_R: Ints, rows_R: Ints) -> Ints:
    """Return the positions [N] of all rows of requests, of which some are trees."""
    offsets_N = np.concatenate([np.arange(count) for count in rows_R])
    depths_N = np.where(paths_ND[:, 0] < 0, offsets_N, (paths_ND >= 0).sum(1) - 1)
    return np.repeat(first_R, rows_R) + depths_N


def branches(paths_ND: Ints) -> list[tuple[Ints, int]]:
    """Return the paths of a tree's leaves, and how many rows of each are also on an earlier one."""
    lengths_N = (paths_ND >= 0).sum(1)
    parents = {int(path[length - 2]) for path, length in zip(paths_ND, lengths_N, strict=True) if length > 1}
    found: list[tuple[Ints, int]] = []
    seen: set[int] = set()
    for row in range(len(paths_ND)):
        if row not in parents:
            path = paths_ND[row, : lengths_N[row]]
            found.append((path, sum(offset in seen for offset in path.tolist())))
            seen.update(path.tolist())
    return found
