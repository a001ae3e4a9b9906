"""Draft trees of a step's requests: their rows and accepted paths, on the host.

    row      0       1     2     3      4          row 0 is the anchor, row i + 1 node i
    parent           0     0     1      3
    depth    0       1     1     2      3          position = the anchor's + depth
    path     0       0 1   0 2   0 1 3  0 1 3 4    rows of the request that it sees in addition to its context

A node's K/V slot is that of its row, as if rows were consecutive positions; so after verification the rows of
the accepted path move to the first slots. A request with drafts in a chain needs neither paths nor moves.
Made by `../sampling/tree_growth.py`; read by `../request_states.py` and
`actors/targets/runners/cpu_runner.py`.

Legend: R requests, M most nodes, N rows of a step, D rows of the longest path, W values of a request, n moved
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....cluster.request.logprobs import StepLogprobs
from ....cluster.speculation.draft_tree import TreeNodes, depth_and_width
from ....cluster.step.scheduler_output import BoolArray, FloatArray, IntArray, TreeOutcome
from ...compute.draft_trees import paths_of

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """Trees of the drafts of a step's requests.

    Attributes:
        tokens_RM: drafted tokens, int64; -1 after a request's last node.
        parents_RM: row of each node's parent in its request, int64.
        num_nodes_R: int32.
        ranks_RM, chances_RM: see `TreeNodes` (`cluster/speculation/draft_tree.py`); int64 and fp32.
    """

    tokens_RM: Ints
    parents_RM: Ints
    num_nodes_R: IntArray
    ranks_RM: Ints
    chances_RM: FloatArray

    @classmethod
    def empty(cls, num_requests: int, max_nodes: int) -> DraftTrees:
        """Return trees without a node, with parents as in chains."""
        size = (num_requests, max_nodes)
        parents_RM = np.tile(np.arange(max_nodes), (num_requests, 1))
        zeros_R, zeros_RM = np.zeros(num_requests, dtype=np.int32), np.zeros(size, dtype=np.int64)
        return cls(np.full(size, -1), parents_RM, zeros_R, zeros_RM, np.zeros(size, dtype=np.float32))

    def write(self, request: int, nodes: TreeNodes) -> None:
        """Fill in a request's nodes."""
        count = self.num_nodes_R[request] = len(nodes.parents)
        self.tokens_RM[request, :count], self.parents_RM[request, :count] = nodes.tokens, nodes.parents
        self.ranks_RM[request, :count], self.chances_RM[request, :count] = nodes.ranks, nodes.chances

    def branches(self) -> BoolArray:
        """Return whether each request's drafts branch, bool [R]."""
        places_M = np.arange(self.parents_RM.shape[1])
        real_RM = places_M < self.num_nodes_R[:, None]
        return (real_RM & (self.parents_RM != places_M)).any(axis=1)

    def cut(self, num_nodes_R: IntArray) -> DraftTrees:
        """Return the trees of the first nodes."""
        is_real_RM = np.arange(self.tokens_RM.shape[1]) < num_nodes_R[:, None]
        tokens_RM = np.where(is_real_RM, self.tokens_RM, -1)
        return replace(self, tokens_RM=tokens_RM, num_nodes_R=num_nodes_R)

    def depths(self) -> Ints:
        """Return the depth of each request's rows, int64 [R, M + 1]; 0 for anchors and past the last node."""
        return self._from_root(np.int64(0), np.ones_like(self.parents_RM), np.add)

    def survivals(self) -> FloatArray:
        """Return the chance of each node's path, fp32 [R, M]; 0 past the last node."""
        return self._from_root(np.float32(1), self.chances_RM, np.multiply)[:, 1:]

    def _from_root(
        self, root: np.generic, steps_RM: NDArray[Any], join: np.ufunc
    ) -> NDArray[Any]:  # Any: of the root's dtype
        """Join each node's step with its parent's value, from the root's on; 0 past the last node."""
        num_requests, num_nodes = self.parents_RM.shape
        values_RW, requests_R = np.full((num_requests, num_nodes + 1), root), np.arange(num_requests)
        for node in range(num_nodes):
            value_R = join(values_RW[requests_R, self.parents_RM[:, node]], steps_RM[:, node])
            values_RW[:, node + 1] = np.where(node < self.num_nodes_R, value_R, 0)
        return values_RW

    def row_parents(self, num_rows_R: Ints) -> Ints:
        """Return each row's parent in its request, int64 [N]; -1 for first rows.

        Args:
            num_rows_R: rows of each request: 1 + its nodes, or 0.
        """
        roots_R = np.full(len(self.parents_RM), -1)
        rows_N = chain_parents(num_rows_R) + 1
        return np.column_stack([roots_R, self.parents_RM])[
            np.repeat(np.arange(len(roots_R)), num_rows_R), rows_N
        ]

    def positions(self, positions_N: Ints, num_rows_R: Ints) -> Ints:
        """Return the absolute positions of a step's rows, given those of chains with as many rows."""
        is_tree_R, depths_RW, first_R = self.branches(), self.depths(), np.cumsum(num_rows_R) - num_rows_R
        positions_N = positions_N.copy()
        for r in np.flatnonzero(is_tree_R).tolist():
            first, count = int(first_R[r]), int(num_rows_R[r])
            positions_N[first : first + count] = positions_N[first] + depths_RW[r, :count]
        return positions_N

    def paths(self, num_rows_R: Ints) -> IntArray:
        """Return the rows of its request that each row sees, by depth, int32 [N, D].

        -1 beyond its own depth, and in all rows of requests without a tree.
        """
        num_columns, first_R = int(self.depths().max()) + 1, np.cumsum(num_rows_R) - num_rows_R
        paths_ND = np.full((int(num_rows_R.sum()), num_columns), -1, dtype=np.int32)
        for r in np.flatnonzero(self.branches()).tolist():
            paths = paths_of([-1, *self.parents_RM[r, : self.num_nodes_R[r]].tolist()], num_columns)
            paths_ND[first_R[r] : first_R[r] + len(paths)] = paths
        return paths_ND

    def accept(self, chosen_X: Ints, counts_R: Ints) -> AcceptedPaths:
        """Follow each request's path of nodes that equal the token sampled at their parents.

        Args:
            chosen_X: sampled tokens, request after request, one per row of it that samples.
            counts_R: such rows of each request; 1 + its nodes, or 0 if nothing is sampled.
        """
        num_requests, width = len(counts_R), int(self.depths().max()) + 1
        token_ids_RW, rows_RW = (np.full((num_requests, width), -1, dtype=np.int64) for _ in range(2))
        num_tokens_R = np.zeros(num_requests, dtype=np.int64)
        begin = 0
        for r, count in enumerate(counts_R.tolist()):
            if not count:
                continue
            chosen = chosen_X[begin : begin + count].tolist()
            begin += count
            tokens, parents = self.tokens_RM[r].tolist(), self.parents_RM[r].tolist()
            path = [0]
            # A parent precedes its children, so one pass follows the path; siblings' tokens differ.
            for node in range(count - 1):
                if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:
                    path.append(node + 1)
            token_ids_RW[r, : len(path)] = [chosen[row] for row in path]
            rows_RW[r, : len(path)] = path
            num_tokens_R[r] = len(path)
        return AcceptedPaths(token_ids_RW, rows_RW, num_tokens_R)

    def main_nodes(self) -> BoolArray:
        """Return whether a node is on its request's main path, the chain of best candidates, bool [R, M]."""
        return self._from_root(np.True_, self.ranks_RM == 0, np.logical_and)[:, 1:]

    def outcome(self, accepted: AcceptedPaths, width: int) -> TreeOutcome:
        """Return what the accepted paths teach about trees of this width."""
        main_RM = self.main_nodes()
        num_main_R, branches_R = np.zeros(len(main_RM), dtype=np.int32), self.branches()
        expected_F, accepted_F = np.zeros((2, width + 1), dtype=np.float32)
        depths_R, widths_R = np.zeros((2, len(main_RM)), dtype=np.int32)
        for r, count in enumerate(accepted.num_tokens_R.tolist()):
            on_path = set(accepted.rows_RW[r, :count].tolist())
            is_main = [True, *main_RM[r].tolist()]
            num_main_R[r] = sum(is_main[row] for row in on_path if row)
            if not branches_R[r]:
                continue
            num_nodes = int(self.num_nodes_R[r])
            depths_R[r], widths_R[r] = depth_and_width(self.parents_RM[r, :num_nodes].tolist())
            of_nodes = self.parents_RM[r], self.ranks_RM[r], self.chances_RM[r]
            nodes = zip(*(values_M[:num_nodes].tolist() for values_M in of_nodes), strict=True)
            for row, (parent, rank, chance) in enumerate(nodes, 1):
                # A forced token is certain, so it teaches nothing; neither does the course of two chains once
                # they differ, since each has a curve of its own.
                teaches = rank > 0 if is_main[parent] else rank < width
                if parent in on_path and chance < 1 and teaches:
                    factor = rank if is_main[parent] else 0
                    expected_F[factor] += chance
                    accepted_F[factor] += row in on_path
        nodes_RW = np.maximum(accepted.rows_RW[:, 1:] - 1, 0)
        ranks_RW = np.take_along_axis(self.ranks_RM, nodes_RW, axis=1).astype(np.int32)
        ranks_RW[accepted.rows_RW[:, 1:] < 0] = -1
        num_main_drafts_R = main_RM.sum(axis=1, dtype=np.int32)
        return TreeOutcome(
            num_main_drafts_R, num_main_R, ranks_RW, expected_F, accepted_F, depths_R, widths_R
        )

    def pack(self) -> Ints:
        """Return all of it, int64 [R, 1 + 4 M]."""
        chances_RM = self.chances_RM.astype(np.float64).view(np.int64)
        columns = (self.num_nodes_R, self.tokens_RM, self.parents_RM, self.ranks_RM, chances_RM)
        return np.column_stack(columns).astype(np.int64)

    @classmethod
    def unpack(cls, packed: Ints) -> DraftTrees:
        tokens_RM, parents_RM, ranks_RM, bits_RM = np.split(packed[:, 1:], 4, axis=1)
        chances_RM = np.ascontiguousarray(bits_RM).view(np.float64).astype(np.float32)
        return cls(tokens_RM, parents_RM, packed[:, 0].astype(np.int32), ranks_RM, chances_RM)


def chain_parents(num_rows_R: Ints) -> Ints:
    """Return the row before each row in its request, int64 [N]; -1 for first rows."""
    return np.arange(-1, num_rows_R.sum() - 1) - np.repeat(np.cumsum(num_rows_R) - num_rows_R, num_rows_R)


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    """The accepted path of each request.

    Attributes:
        token_ids_RW: new tokens, then -1; the last one is the target's own.
        rows_RW: rows of the path in their request, from the anchor on, then -1.
        num_tokens_R: new tokens.
    """

    token_ids_RW: Ints
    rows_RW: Ints
    num_tokens_R: Ints

    def moves(self, num_rows_R: Ints) -> tuple[Ints, Ints]:
        """Return the step's rows with K/V to move, and the rows of the slots to move it to, [n] each."""
        requests_n, places_n = np.nonzero(self.rows_RW > np.arange(self.rows_RW.shape[1]))
        first_n = (np.cumsum(num_rows_R) - num_rows_R)[requests_n]
        return first_n + self.rows_RW[requests_n, places_n], first_n + places_n

    def logprobs_of(self, found: StepLogprobs) -> StepLogprobs:
        """Return the log probabilities of the paths' rows, given those of all sampled rows."""
        first_A, counts_A = np.cumsum(found.counts_A) - found.counts_A, self.num_tokens_R[found.requests_A]
        rows_A = [
            first + self.rows_RW[request, :count]
            for first, request, count in zip(first_A, found.requests_A, counts_A, strict=True)
        ]
        return StepLogprobs(
            found.requests_A, counts_A.astype(np.int32), found.rows.take(np.concatenate(rows_A))
        )

    def context_rows(self, num_rows_R: Ints, is_tree_R: BoolArray) -> tuple[Ints, Ints]:
        """Return the rows with a place in the context, and the rows of the slots that they take.

        All rows of requests without a tree, as rejected drafts of a chain are overwritten later.
        """
        sources, targets, first = list[Ints](), list[Ints](), 0
        for r, num_rows in enumerate(num_rows_R.tolist()):
            count = int(self.num_tokens_R[r]) if is_tree_R[r] else num_rows
            places = np.arange(first, first + count)
            sources.append(first + self.rows_RW[r, :count] if is_tree_R[r] else places)
            targets.append(places)
            first += num_rows
        return np.concatenate(sources), np.concatenate(targets)
