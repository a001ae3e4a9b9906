"""Accepted paths of draft trees, and the rows that they leave, against a walk over children."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from manta.drafter.step.inputs.draft_trees import AcceptedPaths, DraftTrees

MOST = 12


def random_trees(seed: int) -> DraftTrees:
    """Trees and chains of up to MOST nodes, siblings with different tokens of a vocabulary of 3."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 4))
    tokens, parents = np.full((count, MOST), -1), np.tile(np.arange(MOST), (count, 1))
    sizes = random.integers(0, MOST + 1, count).astype(np.int32)
    for r in range(count):
        taken = set()
        for node in range(sizes[r]):
            free = [
                (parent, token)
                for parent in range(node + 1)
                for token in range(3)
                if (parent, token) not in taken
            ]
            # most nodes follow the newest one, so that paths are long
            parent, token = free[-1 - int(random.integers(2))] if r else free[int(random.integers(len(free)))]
            taken.add((parent, token))
            parents[r, node], tokens[r, node] = parent, token
    ranks = np.array(
        [[(parents[r, :node] == parents[r, node]).sum() for node in range(MOST)] for r in range(count)]
    )
    return DraftTrees(tokens, parents, sizes, ranks, random.random(tokens.shape).astype(np.float32))


def walked(trees: DraftTrees, r: int, chosen: list[int]) -> list[int]:
    """The rows of a request's accepted path, by looking for the child that is the chosen token."""
    children = {
        (int(trees.parents_RM[r, node]), int(trees.tokens_RM[r, node])): node + 1
        for node in range(trees.num_nodes_R[r])
    }
    path = [0]
    while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(child)
    return path


def verified(seed: int) -> tuple[DraftTrees, np.ndarray, np.ndarray, AcceptedPaths]:
    """Return random trees, their numbers of rows, a chosen token of each row, and what is accepted."""
    trees, random = random_trees(seed), np.random.default_rng(seed + 1)
    num_rows = trees.num_nodes_R.astype(np.int64) + 1
    chosen = random.integers(0, 3, num_rows.sum())
    return trees, num_rows, chosen, trees.accept(chosen, num_rows)


@given(st.integers(0, 2**31))
def test_the_accepted_path_follows_the_sampled_tokens(seed: int) -> None:
    trees, counts, chosen, accepted = verified(seed)
    first = 0
    for r, count in enumerate(counts.tolist()):
        of_request = chosen[first : first + count].tolist()
        path = walked(trees, r, of_request)
        length = len(path)
        assert accepted.num_tokens_R[r] == length
        assert accepted.rows_RW[r].tolist()[:length] == path
        assert accepted.token_ids_RW[r].tolist()[:length] == [of_request[row] for row in path]
        assert (accepted.token_ids_RW[r, length:] == -1).all()
        first += count


@given(st.integers(0, 2**31))
def test_the_outcome_counts_main_paths_and_branches(seed: int) -> None:
    trees, _, _, accepted = verified(seed)
    width = 2 + seed % 2  # 2: the last of three children is the second source's
    outcome = trees.outcome(accepted, width)
    expected, hits = np.zeros(width + 1), np.zeros(width + 1)
    for r, branches in enumerate(trees.branches()):
        best = [0]  # the main path, by looking for the best child
        while rows := [
            node + 1
            for node in range(trees.num_nodes_R[r])
            if trees.parents_RM[r, node] == best[-1] and trees.ranks_RM[r, node] == 0
        ]:
            best += rows
        path = accepted.rows_RW[r, : accepted.num_tokens_R[r]].tolist()
        assert outcome.num_main_drafts_R[r] == len(best) - 1
        assert outcome.num_main_accepted_R[r] == len(set(best) & set(path)) - 1
        ranks = [int(trees.ranks_RM[r, row - 1]) for row in path[1:]]
        assert outcome.ranks_RW[r].tolist() == ranks + [-1] * (outcome.ranks_RW.shape[1] - len(ranks))
        levels = trees.depths()[r, 1 : 1 + trees.num_nodes_R[r]].tolist()
        sizes = max(levels, default=0), max(map(levels.count, levels), default=0)
        assert (outcome.depths_R[r], outcome.widths_R[r]) == (sizes if branches else (0, 0))
        for node in range(trees.num_nodes_R[r]) if branches else ():
            parent, rank = int(trees.parents_RM[r, node]), int(trees.ranks_RM[r, node])
            if parent in path and not (rank == 0 if parent in best else rank == width):
                expected[rank if parent in best else 0] += trees.chances_RM[r, node]
                hits[rank if parent in best else 0] += node + 1 in path
    np.testing.assert_allclose(outcome.expected_F, expected, rtol=1e-5)
    np.testing.assert_array_equal(outcome.accepted_F, hits)


@given(st.integers(0, 2**31))
def test_moved_rows_leave_each_path_at_its_positions(seed: int) -> None:
    """The slots hold the rows' numbers; after the moves a path's positions hold the path's rows."""
    trees, num_rows, _, accepted = verified(seed)
    slots = np.arange(num_rows.sum())
    sources, targets = accepted.moves(num_rows)
    slots[targets] = slots[sources]
    is_tree = trees.branches()
    rows, places = accepted.context_rows(num_rows, is_tree)
    expected = list[int]()
    for r, first in enumerate((np.cumsum(num_rows) - num_rows).tolist()):
        path = accepted.rows_RW[r, : accepted.num_tokens_R[r]]
        assert slots[first : first + len(path)].tolist() == (first + path).tolist()
        expected += (first + path).tolist() if is_tree[r] else range(first, first + int(num_rows[r]))
    assert rows.tolist() == expected
    assert slots[places].tolist() == expected or not is_tree.all()


@given(st.integers(0, 2**31))
def test_rows_see_their_ancestors_at_positions_by_depth(seed: int) -> None:
    trees, num_rows, *_ = verified(seed)
    first = np.cumsum(num_rows) - num_rows
    context = 7 + 10 * np.arange(len(num_rows))
    chains = np.concatenate(
        [start + np.arange(count) for start, count in zip(context, num_rows, strict=True)]
    )
    positions, paths = trees.positions(chains, num_rows), trees.paths(num_rows)
    for r, branches in enumerate(trees.branches()):
        rows = slice(first[r], first[r] + num_rows[r])
        if not branches:
            assert (paths[rows] == -1).all() and (positions[rows] == chains[rows]).all()
            continue
        for row, path in enumerate(paths[rows].tolist()):
            seen = [row]
            while seen[0]:
                seen.insert(0, int(trees.parents_RM[r, seen[0] - 1]))
            assert path == seen + [-1] * (len(path) - len(seen))
            assert positions[first[r] + row] == context[r] + len(seen) - 1


@given(st.integers(0, 2**31), st.integers(0, MOST))
def test_cut_trees_survive_a_broadcast(seed: int, size: int) -> None:
    trees = random_trees(seed)
    trees = trees.cut(np.minimum(trees.num_nodes_R, size).astype(np.int32))
    unpacked = DraftTrees.unpack(trees.pack())
    for name in ("tokens_RM", "parents_RM", "num_nodes_R", "ranks_RM", "chances_RM"):
        assert (getattr(unpacked, name) == getattr(trees, name)).all()
    assert (trees.tokens_RM[np.arange(MOST) >= trees.num_nodes_R[:, None]] == -1).all()
