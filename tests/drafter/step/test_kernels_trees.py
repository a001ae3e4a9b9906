"""Growth and acceptance of draft trees on the device, against the host's.

Legend: R requests, M most nodes, D positions of a block, P candidates before, C candidates, W most children.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta.cluster.speculation.draft_tree import AcceptanceCurve, TreeSizes, candidate_chances, grow_tree
from manta.cluster.speculation.draft_trimming import prefixes_to_verify
from manta.cluster.step.scheduler_output import Trim
from manta.drafter.step.gpu_triton.draft_trees import DeviceTrees, grow_trees, likely_children
from manta.drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests, SlotTables, lay_out_rows
from manta.drafter.step.gpu_triton.tree_rows import accept_paths, path_rows, place_rows, trim_trees
from manta.drafter.step.gpu_triton.verification import TrimLists
from manta.drafter.step.inputs.draft_trees import DraftTrees
from support.engines.devices import DEVICE
from torch import Tensor

pytestmark = [pytest.mark.usefixtures("on_the_device"), pytest.mark.sanitized]
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
        lists = TrimLists(*map(put, (self.bias_R, self.bias_R, self.bias_K, self.slope_K, self.factors)))
        return likely_children(put(self.scores), self.cu_rows, max(self.depths) + 1, lists)


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
    factors, grown = put(blocks.factors), DeviceTrees.build(4, TreeSizes(8, how["width"], most), DEVICE)
    grow_trees(*blocks.children(), put(blocks.ids), blocks.cu_rows, put(limits), factors, grown)
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


def test_without_branches_trees_are_chains() -> None:
    """Factors of 0 leave the best candidate of each row alone."""
    blocks = Blocks(2, [5, 0, 7, 3], pairs=True, count=4, width=3)
    blocks.scores[-2, 0] = 0.0
    blocks.factors = np.array([1.0, 0.0, 0.0], np.float32)
    grown = DeviceTrees.build(4, TreeSizes(8, 3, 20), DEVICE)
    limits = put(np.array([20, 0, 6, 2], np.int32))
    grow_trees(*blocks.children(), put(blocks.ids), blocks.cu_rows, limits, put(blocks.factors), grown)
    assert grown.num_nodes_R.tolist() == [5, 0, 6, 2]
    assert (grown.parents_RM.cpu() == torch.arange(20)).all() and (grown.ranks_RM == 0).all()


@pytest.mark.parametrize("room", [4, 9, 17, 40])
def test_the_most_valuable_nodes_fill_the_rows(room: int) -> None:
    """With ties, a request of no weight, one without drafts, and padding; as on the host."""
    random, most, depth = np.random.default_rng(room), 12, 5
    planned, grown = np.array([12, 0, 8, 5]), np.array([10, 0, 8, 2])
    survivals = -np.sort(-random.choice([0.9, 0.5, 0.2, 0.1], (4, most)), axis=1).astype(np.float32)
    survivals[np.arange(most) >= grown[:, None]] = 0
    trees = DeviceTrees.build(5, TreeSizes(depth, 2, most), DEVICE)
    trees.survivals_RM[:4] = put(survivals)
    weights, drafts = np.array([1.0, 1.0, 2.0, 0.0], np.float32), np.minimum(planned, depth)

    def lists(rows: np.ndarray) -> DeviceStepRequests:
        ones = put(np.ones(5, np.int32))
        cu_rows = np.append(np.append(0, np.cumsum(1 + rows)), (1 + rows).sum()).astype(np.int32)
        counts = put(np.append(rows, 0).astype(np.int32))
        return DeviceStepRequests(ones, put(cu_rows), counts, ones, ones, room, 1 + most, most)

    margins = random.random(64).astype(np.float32)
    found_R = torch.full((5,), 77, dtype=torch.int32, device=DEVICE)
    home = torch.full((5, depth), 5.0, device=DEVICE)
    found = trim_trees(
        lists(planned), trees, lists(drafts), put(margins), put(np.append(weights, 1)), room, found_R, home
    )
    none = np.zeros(0, np.float32)
    expected = prefixes_to_verify(survivals, grown, 4, Trim(none, none, none, weights, none, num_rows=room))
    assert found.num_drafts_R.tolist() == [*expected.tolist(), 0]
    assert found.cu_rows_R1.tolist() == [0, *np.cumsum(1 + expected).tolist(), int((1 + expected).sum())]
    first = np.cumsum(1 + drafts) - drafts
    for r, count in enumerate(drafts):
        np.testing.assert_array_equal(home[r, :count].cpu(), margins[first[r] : first[r] + count])
        assert home[r, count:].isnan().all()


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


def on_device(trees: DraftTrees, depth: int) -> DeviceTrees:
    """The trees, and one of padding."""
    most = trees.tokens_RM.shape[1]
    put_there = DeviceTrees.build(len(trees.tokens_RM) + 1, TreeSizes(depth - 1, 3, most), DEVICE)
    for theirs, mine in (
        (put_there.tokens_RM, trees.tokens_RM),
        (put_there.parents_RM, trees.parents_RM),
        (put_there.num_nodes_R, trees.num_nodes_R),
    ):
        theirs[:-1] = put(mine.astype(np.int32))
    return put_there


class Step:
    """Trees of decoding requests, and padding, with random slots, pages and tokens."""

    def __init__(self, seed: int, sizes: list[int]) -> None:
        self.random = random = np.random.default_rng(seed)
        self.trees, self.sizes = random_trees(random, sizes, 40), sizes
        self.slots = random.permutation(SLOTS)[: len(sizes)]
        self.computed = random.integers(0, 30, len(sizes))
        self.token_ids = random.integers(3, 9, (SLOTS, 128)).astype(np.int32)
        num_computed = np.full(SLOTS, 1000, np.int32)
        num_computed[self.slots] = self.computed
        pages = random.permutation(2 * SLOTS * PAGES).reshape(2, SLOTS, PAGES).astype(np.int32)
        skip_slots = np.array([SKIP, SKIP + 1]) + 10**6
        tables = (self.token_ids.copy(), pages, num_computed)
        self.tables = SlotTables(*map(put, tables), 16, put(skip_slots))
        self.rows_R, self.depth = 1 + np.array(sizes), int(self.trees.depths().max()) + 3
        num_rows, ends = int(self.rows_R.sum()), np.cumsum(self.rows_R)
        lists = (
            np.append(self.slots, -1), np.append(0, np.append(ends, num_rows)), np.append(sizes, 0),
            np.append(np.ones(len(sizes)), 0), np.append(ends - self.rows_R, 0),
        )  # fmt: skip
        of_device = [put(values.astype(np.int32)) for values in lists]
        self.requests = DeviceStepRequests(*of_device, num_rows=num_rows + 3, max_rows=42, max_drafts=40)
        self.on_device = on_device(self.trees, self.depth)


@pytest.mark.parametrize("seed", range(4))
def test_paths_positions_and_tokens_of_rows_are_the_hosts(seed: int) -> None:
    """Trees, a chain, a request without drafts, and padding."""
    step = Step(seed, [12, 5, 40, 0])
    step.trees.parents_RM[1] = np.arange(40)
    step.on_device = on_device(step.trees, step.depth)
    count, owners = int(step.rows_R.sum()), np.repeat(np.arange(4), step.rows_R)
    chains = lay_out_rows(step.requests, step.tables)
    positions = chains.positions_N.cpu().numpy().copy()
    rows = place_rows(step.requests, step.on_device, chains, step.tables)
    found, expected = rows.tree_paths[:count].cpu().numpy(), step.trees.paths(step.rows_R)
    is_tree = step.trees.branches()[owners]
    assert (found[is_tree, : expected.shape[1]] == expected[is_tree]).all()
    assert (found[:, expected.shape[1] :] == -1).all()
    triangle = np.tril(np.arange(6) + 1) - 1
    assert found[owners == 1][:, :6].tolist() == triangle.tolist(), "a chain as a tree"
    assert found[owners == 3][0].tolist() == [0] + [-1] * (step.depth - 1)
    placed = step.trees.positions(positions[:count], step.rows_R).tolist()
    assert rows.positions_N.tolist() == placed + positions[count:].tolist()
    for r, size in enumerate(step.sizes):
        anchor, nodes = int(step.computed[r]), step.trees.tokens_RM[r, :size].tolist()
        known = step.token_ids[step.slots[r], : anchor + 1].tolist()
        assert step.tables.token_ids[step.slots[r], : len(known) + size].tolist() == known + nodes
        assert rows.token_ids_N[:count].cpu().numpy()[owners == r].tolist() == known[-1:] + nodes
    assert all(batch.tree is not None for batch in rows.batches)


@pytest.mark.parametrize("seed", range(8))
def test_accepted_paths_moves_and_context_are_the_hosts(seed: int) -> None:
    """Trees of up to 40 nodes beside a chain, a request without drafts, and padding."""
    step = Step(seed, [12, 0, 40, 1])
    random, trees, sizes = step.random, step.trees, step.sizes
    chosen = random.integers(0, 3, step.rows_R.sum() + 3)
    for r in (0, 2):  # the target takes the path to one of the last nodes
        row, first = int(random.integers(sizes[r] - 4, sizes[r] + 1)), int(step.rows_R[:r].sum())
        while row:
            parent = trees.parents_RM[r, row - 1]
            chosen[first + parent], row = trees.tokens_RM[r, row - 1], parent
    expected, depth = trees.accept(chosen, step.rows_R), step.depth
    rows = place_rows(step.requests, step.on_device, lay_out_rows(step.requests, step.tables), step.tables)
    outcome = torch.full((5, depth + 1), 99, dtype=torch.int32, device=DEVICE)
    kv_slots = np.stack([slots.cpu().numpy() for slots in rows.kv_slots])
    context = put(kv_slots.copy())
    moves = accept_paths(put(chosen), step.requests, step.on_device, context, step.tables, outcome)

    width = expected.token_ids_RW.shape[1]
    assert outcome[:-1, :width].tolist() == expected.token_ids_RW.tolist()
    assert outcome[:-1, -1].tolist() == expected.num_tokens_R.tolist()
    assert (outcome[:-1, width:-1] == -1).all() and outcome[-1].tolist() == [-1] * depth + [0]
    assert expected.num_tokens_R.max() > 2, "a path was accepted"
    paths = step.on_device.paths_RD.cpu().numpy()
    assert paths[:-1, :width].tolist() == expected.rows_RW.tolist()
    assert (paths[:-1, width:] == -1).all() and (paths[-1] == -1).all()
    on_paths = path_rows(step.requests, step.on_device, outcome[:, -1]).tolist()
    anchors = (np.cumsum(step.rows_R) - step.rows_R)[:, None]
    all_rows = (anchors + expected.rows_RW)[expected.rows_RW >= 0].tolist()
    assert len(on_paths) == min(step.requests.num_rows, 5 * depth)
    assert on_paths == all_rows + [0] * (len(on_paths) - len(all_rows))
    for r, slot in enumerate(step.slots):
        known = step.computed[r] + 1
        new = expected.token_ids_RW[r, : expected.num_tokens_R[r]].tolist()
        kept = [*step.token_ids[slot, :known].tolist(), *new]
        assert step.tables.token_ids[slot, : len(kept)].tolist() == kept
        assert int(step.tables.num_computed[slot]) == known + len(new) - 1
    sources, targets = (values.flatten(1).cpu().numpy() for values in moves)
    from_rows, to_rows = expected.moves(step.rows_R)
    for group in range(2):
        moved = sources[group] != targets[group]
        assert sources[group][moved].tolist() == kv_slots[group][from_rows].tolist()
        assert targets[group][moved].tolist() == kv_slots[group][to_rows].tolist()
        skip = int(step.tables.skip_slots[group])
        wanted = np.full(len(chosen), skip)
        for r, anchor in enumerate(np.cumsum(step.rows_R) - step.rows_R):
            path = expected.rows_RW[r, : expected.num_tokens_R[r]]
            wanted[anchor + path] = kv_slots[group][anchor + np.arange(len(path))]
        assert context[group].tolist() == wanted.tolist()
