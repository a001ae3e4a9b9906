"""Draft trees are the sets of nodes with the largest sum of survivals, whatever their size."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.speculation.draft_tree import (
    AcceptanceCurve,
    Child,
    CopiedChain,
    TreeNodes,
    candidate_chances,
    grow_tree,
)

CURVE = AcceptanceCurve.prior(4)
IDS = np.tile(np.arange(3), (4, 1))  # a candidate's token is its index
SCORES = st.integers(0, 2**31).map(
    lambda seed: np.random.default_rng(seed).normal(size=(4, 1 + 2 * (seed % 2), 3)).astype(np.float32) * 3
)


def all_paths(chances: np.ndarray, width: int) -> dict[tuple[int, ...], float]:
    """The survival of every path of candidates, among the `width` best of each position."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(len(chances)):
        for path in [path for path in found if len(path) == depth]:
            after = chances[depth][path[-1] if path and chances.shape[1] > 1 else 0]
            for candidate in np.argsort(-after, kind="stable")[:width].tolist():
                found[(*path, candidate)] = found[path] * float(after[candidate])
    del found[()]
    return found


def paths_of(nodes) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, candidate in zip(nodes.parents, nodes.tokens, strict=True):
        paths.append((*paths[parent], candidate))
    return paths[1:]


@given(SCORES)
def test_chances_rank_candidates_by_score_and_leave_a_rest(scores: np.ndarray) -> None:
    chances = candidate_chances(scores, CURVE)
    assert (chances.argmax(axis=-1) == scores.argmax(axis=-1)).all()
    assert (np.diff(np.take_along_axis(chances, np.argsort(scores, axis=-1), axis=-1), axis=-1) >= 0).all()
    assert (chances > 0).all() and (chances.sum(axis=-1) < 1 + 1e-6).all()


def test_an_impossible_candidate_has_no_chance_and_no_node() -> None:
    scores = np.array([[[1.0, -np.inf, 0.0]], [[-np.inf, 2.0, -np.inf]]], dtype=np.float32)
    chances = candidate_chances(scores, AcceptanceCurve.prior(2))
    assert (chances == 0).tolist() == [[[False, True, False]], [[True, False, True]]]
    nodes = grow_tree(chances, IDS, 20, 3)
    assert sorted(paths_of(nodes)) == [(0,), (0, 1), (2,), (2, 1)]
    nothing = candidate_chances(np.full((2, 1, 3), -np.inf, np.float32), AcceptanceCurve.prior(2))
    assert grow_tree(nothing, IDS, 20, 3).parents == []


@settings(max_examples=40)
@given(SCORES, st.integers(1, 3), st.integers(1, 12))
def test_the_tree_has_the_most_survival_that_its_size_allows(
    scores: np.ndarray, width: int, size: int
) -> None:
    chances = candidate_chances(scores, CURVE)
    nodes, paths = grow_tree(chances, IDS, size, width), all_paths(chances, width)
    best = sorted(paths.values(), reverse=True)[:size]  # a path never survives more often than its beginning
    np.testing.assert_allclose(nodes.survivals, best, rtol=1e-5)
    grown = paths_of(nodes)
    assert len(set(grown)) == len(grown) and all(
        path[:-1] in ((), *grown[:place]) for place, path in enumerate(grown)
    )
    np.testing.assert_allclose([paths[path] for path in grown], nodes.survivals, rtol=1e-5)


@given(SCORES, st.integers(1, 12))
def test_a_tree_of_width_one_is_the_chain_of_best_candidates(scores: np.ndarray, size: int) -> None:
    nodes = grow_tree(candidate_chances(scores, CURVE), IDS, size, 1)
    assert nodes.parents == list(range(min(size, 4))) and not any(nodes.ranks)
    before = 0
    for depth, candidate in enumerate(nodes.tokens):
        assert candidate == scores[depth][before if scores.shape[1] > 1 else 0].argmax()
        before = candidate


@given(SCORES, st.integers(2, 12))
def test_the_first_nodes_are_the_smaller_tree(scores: np.ndarray, size: int) -> None:
    chances = candidate_chances(scores, CURVE)
    large, small = grow_tree(chances, IDS, size, 3), grow_tree(chances, IDS, size - 1, 3)
    assert [values[: len(small.parents)] for values in large] == list(small)


@given(SCORES)
def test_factors_change_the_chances_of_branches_alone(scores: np.ndarray) -> None:
    plain = candidate_chances(scores, CURVE)
    changed = candidate_chances(scores, CURVE, (1.0, 0.5, 0.25))
    by_rank = [np.take_along_axis(each, np.argsort(-scores, axis=-1), axis=-1) for each in (plain, changed)]
    np.testing.assert_array_equal(by_rank[1][..., 0], by_rank[0][..., 0])
    assert (by_rank[1][..., 1:] <= by_rank[0][..., 1:]).all()
    # a factor below 1 leaves the chain, in the end
    grown = [
        grow_tree(candidate_chances(scores, CURVE, (1.0, factor, factor)), IDS, 4, 3)
        for factor in (1.0, 1e-9)
    ]
    assert sum(map(bool, grown[1].ranks)) == 0 <= sum(map(bool, grown[0].ranks))


@given(SCORES)
def test_nodes_off_the_main_path_have_their_factor(scores: np.ndarray) -> None:
    chances = candidate_chances(scores, CURVE)
    nodes = grow_tree(chances, IDS, 20, 3, off_main=0.5)
    survivals, is_main = [1.0, *nodes.survivals], [True]
    for parent, rank in zip(nodes.parents, nodes.ranks, strict=True):
        is_main.append(is_main[parent] and rank == 0)
    for node, parent in enumerate(nodes.parents):
        np.testing.assert_allclose(survivals[node + 1], survivals[parent] * nodes.chances[node], rtol=1e-5)
        before = nodes.tokens[parent - 1] if parent and chances.shape[1] > 1 else 0
        expected = chances[len(paths_of(nodes)[node]) - 1, before, nodes.tokens[node]]
        np.testing.assert_allclose(
            nodes.chances[node], expected * (1.0 if is_main[parent] else 0.5), rtol=1e-5
        )


@given(SCORES, st.integers(1, 3), st.integers(1, 12))
def test_a_restricted_tree_has_the_best_of_the_children_that_remain(
    scores: np.ndarray, width: int, size: int
) -> None:
    """Token 1 is impossible at even depths; an impossible token has no score otherwise."""
    chances = candidate_chances(scores, CURVE)

    def restrict(nodes: TreeNodes, children: list[Child]) -> list[Child]:
        depth = len(paths_of(nodes)[-1]) if nodes.parents else 0
        return [child for child in children if depth % 2 or child.token != 1]

    without = chances.copy()
    without[::2, :, 1] = 0
    restricted, expected = grow_tree(chances, IDS, size, width, restrict=restrict), all_paths(without, width)
    best = [value for value in sorted(expected.values(), reverse=True)[:size] if value > 0]
    np.testing.assert_allclose(restricted.survivals, best, rtol=1e-5)


CHAINS = st.lists(st.tuples(st.integers(0, 2), st.floats(0.05, 0.95)), min_size=1, max_size=4)


def chain_chances(chain: list[tuple[int, float]]) -> np.ndarray:
    """The chances of a block whose only candidates are a chain, each after the one before it alone."""
    chances = np.zeros((len(chain), 3, 3), np.float32)
    for depth, (token, chance) in enumerate(chain):
        chances[depth, chain[depth - 1][0] if depth else slice(None), token] = chance
    return chances


@given(CHAINS, CHAINS, st.booleans(), st.floats(0.1, 10.0))
def test_a_block_and_a_copy_share_nodes_while_they_agree_and_fork_where_they_differ(
    block: list[tuple[int, float]], copied: list[tuple[int, float]], is_main: bool, factor: float
) -> None:
    """Against the union of the prefixes of both chains; copies that differ are no candidates of the block."""
    differs = [ours != theirs for (ours, _), (theirs, _) in zip(block, copied, strict=False)]
    num_shared = differs.index(True) if True in differs else len(differs)
    copied = [(token + 10 * (at >= num_shared), chance) for at, (token, chance) in enumerate(copied)]
    copy = CopiedChain(*zip(*copied, strict=True), is_main, factor)
    nodes = grow_tree(chain_chances(block), IDS, 20, 3, copy=copy)
    chains = [[token for token, _ in chain] for chain in (copied, block)]
    prefixes = [{tuple(chain[:end]) for end in range(1, len(chain) + 1)} for chain in chains]
    paths = paths_of(nodes)
    by_path = dict(zip(paths, zip(nodes.survivals, nodes.ranks, strict=True), strict=True))
    assert set(paths) == prefixes[0] | prefixes[1] and len(set(paths)) == len(paths)
    shared = prefixes[0] & prefixes[1]
    agreed = 1.0
    for depth in range(len(shared)):
        agreed *= max(block[depth][1], copied[depth][1])
    for path in shared:
        assert by_path[path][1] == 0
    for chain, is_first in ((copied, is_main), (block, not is_main)):
        survival, others = agreed, (block if chain is copied else copied)
        for depth in range(len(shared), len(chain)):
            chance = chain[depth][1]
            if depth == len(shared) and not is_first and depth < len(others):
                first = others[depth][1]
                chance = min((1 - first) * min(chance * factor, 1), 0.99 * first)
            survival *= chance
            found, rank = by_path[tuple(token for token, _ in chain[: depth + 1])]
            assert rank == (0 if is_first else 3)
            np.testing.assert_allclose(found, survival, rtol=1e-4)


@given(SCORES, CHAINS, st.booleans(), st.integers(2, 3), st.integers(2, 12), st.floats(0.1, 10.0))
def test_forks_are_trees_without_twins_and_grow_from_their_likeliest_nodes(
    scores: np.ndarray, copied: list[tuple[int, float]], is_main: bool, width: int, size: int, factor: float
) -> None:
    """With candidates around both chains, and copies of tokens that are none."""
    tokens, chances = zip(*((token + 1, chance) for token, chance in copied), strict=True)
    copy = CopiedChain(tokens, chances, is_main, factor)
    nodes = grow_tree(candidate_chances(scores, CURVE), IDS, size, width, 0.7, copy=copy)
    paths = paths_of(nodes)
    assert len(set(paths)) == len(paths) == size
    assert (np.diff(nodes.survivals) <= 1e-6).all() and 0 < min(nodes.survivals) <= max(nodes.survivals) <= 1
    for row in range(size + 1):
        siblings = [node for node, parent in enumerate(nodes.parents) if parent == row]
        assert len(siblings) <= width
        assert sum(nodes.chances[node] for node in siblings) < 1 + 1e-5
        assert [nodes.ranks[node] for node in siblings].count(0) <= 1
    small = grow_tree(candidate_chances(scores, CURVE), IDS, size - 1, width, 0.7, copy=copy)
    assert [values[: size - 1] for values in nodes] == list(small)


def test_a_copy_is_a_tree_of_its_own_where_there_is_no_block() -> None:
    copy = CopiedChain([5, 6, 7], [0.5, 0.25, 0.5], True)
    nodes = grow_tree(np.zeros((0, 1, 1), np.float32), np.zeros((0, 1), np.int64), 2, 4, copy=copy)
    assert nodes == TreeNodes([0, 1], [5, 6], [0.5, 0.125], [0.5, 0.25], [0, 0])
