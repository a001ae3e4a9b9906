"""Growth and acceptance of draft trees on the device, against the host's.

Legend: R requests, M most nodes, D positions of a block, P candidates before, C candidates, W most children.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta.cluster.speculation.draft_tree import AcceptanceCurve, candidate_chances, grow_tree
from manta.drafter.step.gpu_triton.draft_trees import (
    BlockCurves,
    accept_paths,
    grow_trees,
    likely_children,
    place_rows,
)
from manta.drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests, SlotTables
from manta.drafter.step.inputs.draft_trees import DraftTrees
from support.engines.devices import DEVICE
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_the_device")
SKIP, SLOTS, PAGES = 777, 6, 64


def put(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE)


class Blocks:
    """Random candidates of requests' blocks, of which some have no rows, and their curves."""

    def __init__(self, seed: int, depths: list[int], *, pairs: bool, count: int, width: int) -> None:
        random = np.random.default_rng(seed)
        self.depths, rows = depths, sum(depths)
        shape = (rows, count if pairs else 1, count)
        self.scores = random.normal(scale=3, size=shape).astype(np.float32)
        self.scores[random.random(shape) < 0.2] = -np.inf
        self.scores[-2, 0] = -np.inf  # no token is possible
        self.scores[rows // 3] = np.round(self.scores[rows // 3])  # ties
        self.ids = np.argsort(random.random((rows, 100)), axis=1)[:, :count]
        most = max(depths)
        self.bias_R = random.normal(size=len(depths)).astype(np.float32)
        self.bias_K, self.slope_K = random.normal(size=(2, most)).astype(np.float32)
        self.factors = np.array([0.8, *random.uniform(0.5, 2.0, width - 1)], np.float32)

    def of(self, r: int) -> slice:
        return slice(sum(self.depths[:r]), sum(self.depths[: r + 1]))

    def chances(self, r: int) -> np.ndarray:
        count, factors = self.depths[r], tuple(self.factors.tolist())
        curve = AcceptanceCurve(self.bias_K[:count] + self.bias_R[r], self.slope_K[:count])
        return candidate_chances(self.scores[self.of(r)], curve, factors)

    @property
    def cu_rows(self) -> Tensor:
        return put(np.concatenate([[0], np.cumsum(self.depths)]).astype(np.int32))

    def children(self) -> tuple[Tensor, Tensor]:
        curves = BlockCurves(*map(put, (self.bias_R, self.bias_K, self.slope_K, self.factors)))
        return likely_children(put(self.scores), self.cu_rows, max(self.depths) + 1, curves)


CASES = [
    (0, {"pairs": False, "count": 16, "width": 4}),
    (1, {"pairs": True, "count": 6, "width": 3}),
    (2, {"pairs": True, "count": 4, "width": 2}),
    (3, {"pairs": False, "count": 5, "width": 5}),
]


@pytest.mark.parametrize(("seed", "how"), CASES)
def test_likely_children_are_the_hosts(seed: int, how: dict[str, int]) -> None:
    blocks = Blocks(seed, [5, 0, 7, 1], **how)
    chances, places = (values.cpu().numpy() for values in blocks.children())
    for r, depth in enumerate(blocks.depths):
        if not depth:
            continue
        expected = blocks.chances(r)
        order = np.argsort(-expected, axis=-1, kind="stable")[..., : how["width"]]
        falling = np.take_along_axis(expected, order, axis=-1)
        np.testing.assert_allclose(chances[blocks.of(r)], falling, rtol=2e-5, atol=1e-7)
        is_clear = falling > 1e-6  # the order of impossible ones is no one's business
        assert (places[blocks.of(r)] == order)[is_clear].all()


@pytest.mark.parametrize(("seed", "how"), CASES)
def test_trees_are_the_hosts(seed: int, how: dict[str, int]) -> None:
    blocks, most = Blocks(seed, [5, 0, 7, 1], **how), 20
    limits = np.array([20, 3, 13, 20], np.int32)
    factors = put(blocks.factors)
    grown = grow_trees(*blocks.children(), put(blocks.ids), blocks.cu_rows, put(limits), factors, most)
    assert grown.num_nodes_R[1] == 0 and (grown.tokens_RM[1] == -1).all()
    for r in (0, 2, 3):
        limit, chances = int(limits[r]), blocks.chances(r)
        expected = grow_tree(chances, blocks.ids[blocks.of(r)], limit, how["width"], float(blocks.factors[0]))
        count = len(expected.parents)
        assert int(grown.num_nodes_R[r]) == count > 0
        survivals = grown.survivals_RM[r].tolist()
        np.testing.assert_allclose(survivals[:count], expected.survivals, rtol=1e-4, atol=1e-7)
        parents, tokens, ranks = (
            values[r].tolist() for values in (grown.parents_RM, grown.tokens_RM, grown.ranks_RM)
        )
        check_nodes(blocks, r, parents[:count], tokens[:count], ranks[:count], survivals[:count])
        assert survivals[count:] == [0.0] * (most - count)
        assert tokens[count:] == [-1] * (most - count)
        assert parents[count:] == list(range(count, most)), "as in chains"


def check_nodes(
    blocks: Blocks, r: int, parents: list[int], tokens: list[int], ranks: list[int], survivals: list[float]
) -> None:
    """Assert that nodes differ, and are where their chances, ranks and survivals say.

    Products of the same chances in another order are ties, so that a tree of equal survivals may be another.
    """
    assert len(set(zip(parents, tokens, strict=True))) == len(parents)
    chances, ids = blocks.chances(r), blocks.ids[blocks.of(r)].tolist()
    nodes = [(-1, 0, 1.0, 1.0)]  # depth, place, survival, factor of its children's chances
    for parent, token, rank, survival in zip(parents, tokens, ranks, survivals, strict=True):
        depth, before, above, factor = nodes[parent]
        place = ids[depth + 1].index(token)
        of_siblings = chances[depth + 1, before if chances.shape[1] > 1 else 0]
        assert (
            (of_siblings > of_siblings[place]).sum() <= rank <= (of_siblings >= of_siblings[place]).sum() - 1
        )
        expected = above * factor * of_siblings[place]
        np.testing.assert_allclose(survival, expected, rtol=1e-4, atol=1e-7)
        nodes.append((depth + 1, place, expected, factor if rank == 0 else float(blocks.factors[0])))


def random_trees(random: np.random.Generator, sizes: list[int], most: int) -> DraftTrees:
    """Trees of tokens below 3; siblings' tokens differ."""
    trees = DraftTrees.empty(len(sizes), most)
    for r, size in enumerate(sizes):
        free = [(0, token) for token in range(3)]
        for node in range(size):
            parent, token = free.pop(int(random.integers(max(0, len(free) - 4), len(free))))
            trees.parents_RM[r, node], trees.tokens_RM[r, node] = parent, token
            free += [(node + 1, token) for token in range(3)]
        trees.num_nodes_R[r] = size
    return trees


@pytest.mark.parametrize("seed", range(4))
def test_paths_and_positions_of_rows_are_the_hosts(seed: int) -> None:
    """Trees, a chain, a request without drafts, a prompt, and padding."""
    random = np.random.default_rng(seed)
    sizes = [12, 5, 40, 0, 0]
    trees = random_trees(random, sizes, 40)
    trees.parents_RM[1] = np.arange(40)
    num_rows_R = np.array(sizes) + np.array([1, 1, 1, 1, 7])
    first_R, num_rows = random.integers(0, 90, len(sizes)), int(num_rows_R.sum())
    chains = np.concatenate(
        [first + np.arange(rows) for first, rows in zip(first_R, num_rows_R, strict=True)]
    )
    lists = (np.zeros(6), np.append(np.append(0, np.cumsum(num_rows_R)), num_rows), np.append(sizes, 0))
    slots, cu_rows, drafts = (put(values.astype(np.int32)) for values in lists)
    requests = DeviceStepRequests(slots, cu_rows, drafts, slots, slots, num_rows + 2, 41, 40)
    parents = put(np.vstack([trees.parents_RM, np.zeros((1, 40), np.int64)]).astype(np.int32))
    depth = int(trees.depths().max()) + 3
    paths, positions = place_rows(requests, parents, put(np.append(chains, [0, 0])), depth)
    expected = trees.paths(num_rows_R)
    found = paths.cpu().numpy()
    owners = np.repeat(np.arange(len(sizes)), num_rows_R)
    is_tree = trees.branches()[owners]
    assert (found[:num_rows][is_tree, : expected.shape[1]] == expected[is_tree]).all()
    assert (found[:, expected.shape[1] :] == -1).all() and (found[owners.size :] == -1).all()
    triangle = np.tril(np.arange(6) + 1) - 1
    assert found[:num_rows][owners == 1][:, :6].tolist() == triangle.tolist(), "a chain as a tree"
    assert found[:num_rows][owners == 3][0].tolist() == [0] + [-1] * (depth - 1)
    assert (found[:num_rows][owners == 4] == -1).all()
    assert positions[:num_rows].tolist() == trees.positions(chains, num_rows_R).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_accepted_paths_moves_and_context_are_the_hosts(seed: int) -> None:
    """Trees of up to 40 nodes beside a chain, a prompt with and without a sampled token, and padding."""
    random = np.random.default_rng(seed)
    sizes = [12, 0, 40, 0, 1]
    num_known, samples = np.array([1, 5, 2, 3, 1]), np.array([True, True, True, False, True])
    trees = random_trees(random, sizes, 40)
    rows_R = num_known + sizes
    counts_R, num_requests = np.where(samples, 1 + np.array(sizes), 0), len(sizes)
    chosen = random.integers(0, 3, counts_R.sum())
    for r in (0, 2):  # the target takes the path to one of the last nodes
        row, first = int(random.integers(sizes[r] - 4, sizes[r] + 1)), int(counts_R[:r].sum())
        while row:
            parent = trees.parents_RM[r, row - 1]
            chosen[first + parent], row = trees.tokens_RM[r, row - 1], parent
    expected = trees.accept(chosen, counts_R)
    depth = int(trees.depths().max()) + 1

    slots = random.permutation(SLOTS)[:num_requests]
    computed = random.integers(0, 30, num_requests)
    token_ids = random.integers(3, 9, (SLOTS, 128)).astype(np.int32)
    before = token_ids.copy()
    for r, slot in enumerate(slots):
        begin = computed[r] + num_known[r]
        token_ids[slot, begin : begin + sizes[r]] = trees.tokens_RM[r, : sizes[r]]
    num_computed = np.full(SLOTS, 1000, np.int32)
    num_computed[slots] = computed
    num_rows = int(rows_R.sum()) + 3  # of padding
    kv_slots = np.stack([random.permutation(num_rows) + 1000 * group for group in range(2)])
    skip_slots = np.array([SKIP, SKIP + 1])
    tables = SlotTables(
        put(token_ids), put(np.zeros((2, SLOTS, PAGES), np.int32)), put(num_computed), 16, put(skip_slots)
    )
    lists = (
        np.append(slots, -1), np.append(0, np.append(np.cumsum(rows_R), rows_R.sum())), np.append(sizes, 0),
        np.append(samples, False), np.append(np.cumsum(counts_R) - counts_R, 0),
    )  # fmt: skip
    on_device = [put(values.astype(np.int32)) for values in lists]
    requests = DeviceStepRequests(*on_device, num_rows=num_rows, max_rows=42, max_drafts=40)
    outcome = torch.full((num_requests + 1, depth + 1), 99, dtype=torch.int32, device=DEVICE)
    parents = put(np.vstack([trees.parents_RM, np.zeros((1, 40), np.int64)]).astype(np.int32))
    moves = accept_paths(put(chosen), requests, parents, put(kv_slots), tables, outcome)

    assert outcome[:-1, :-1].tolist() == expected.token_ids_RW.tolist()
    assert outcome[:-1, -1].tolist() == expected.num_tokens_R.tolist()
    assert outcome[-1].tolist() == [-1] * depth + [0]
    assert expected.num_tokens_R.max() > 2, "a path was accepted"
    for r, slot in enumerate(slots):
        known = computed[r] + num_known[r]
        new = expected.token_ids_RW[r, : expected.num_tokens_R[r]].tolist()
        kept = [*before[slot, :known].tolist(), *new]
        assert tables.token_ids[slot, : len(kept)].tolist() == kept
        assert int(tables.num_computed[slot]) == known + max(len(new) - 1, 0)
    # The host's paths count rows from the anchor on.
    anchors_R = np.cumsum(rows_R) - rows_R + num_known - 1
    sources, targets = (
        values.flatten(1).cpu().numpy() for values in (moves.source_slots_GRD, moves.target_slots_GRD)
    )
    requests_n, places_n = np.nonzero(expected.rows_RW > np.arange(expected.rows_RW.shape[1]))
    from_rows = anchors_R[requests_n] + expected.rows_RW[requests_n, places_n]
    to_rows = anchors_R[requests_n] + places_n
    for group in range(2):
        moved = sources[group] != targets[group]
        assert sources[group][moved].tolist() == kv_slots[group][from_rows].tolist()
        assert targets[group][moved].tolist() == kv_slots[group][to_rows].tolist()
        context = np.full(num_rows, skip_slots[group])
        for r, anchor in enumerate(anchors_R):
            own = np.arange(anchor - num_known[r] + 1, anchor + 1)
            context[own] = kv_slots[group][own]
            path = expected.rows_RW[r, : expected.num_tokens_R[r]]
            context[anchor + path] = kv_slots[group][anchor + np.arange(len(path))]
        assert moves.context_slots_GN[group].tolist() == context.tolist()
