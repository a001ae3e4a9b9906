"""The integers of a plan that passes on a device read, each at a fixed place of one upload.

    decoding | blocks | trim | prompts | saves | margins

One definition, from which they are written on the host and read on the device. Used by `gpu_runner.py` and by
the process of a split drafter (`workers/drafter/gpu_drafter_session.py`).

Legend: G requests of a pass, N rows of blocks.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.speculation.draft_tree import TreeSizes
from ....cluster.step.scheduler_output import IntArray, SchedulerOutput
from ....drafter.compute.memory.recurrent_state_cache import MAX_SAVES
from ....drafter.step.gpu_triton.inputs.row_layout import NUM_LISTS, DeviceStepRequests, pack
from ....drafter.step.gpu_triton.recurrent_states import pack_saves
from ....drafter.step.gpu_triton.verification import TrimLists

Indices = NDArray[np.intp]
Part = Literal["decoding", "blocks", "trim", "prompts", "saves", "margins"]


def decoding_and_prompts(plan: SchedulerOutput) -> tuple[Indices, Indices]:
    """Return the places in a plan of the requests that decode, and of those that compute prompts.

    A decoding request lacks only its newest token, besides drafts.
    """
    decodes_R = (plan.num_rows == plan.num_drafts + 1) & plan.samples
    assert not plan.num_drafts[~decodes_R].any(), "only decoding requests draft"
    return np.flatnonzero(decodes_R), np.flatnonzero(~decodes_R)


class PlanLayout:
    """Places of the parts. `blocks` is empty if drafts form chains, the last two where nothing uses them.

        decoding, prompts   lists of these requests (`row_layout.pack`)
        blocks              lists of the decoding requests with the rows of their blocks
        trim                `TrimLists`
        saves               `pack_saves` of decoding requests, and of prompts
        margins             of drafts that the host wrote, fp32 by row of blocks

    Args:
        max_requests: most requests that run at once.
        num_drafts: most drafts of a block.
        tree: the largest draft trees; None if drafts form chains.
        saves_states: whether the target has recurrent states.
        num_margins: N.

    Attributes:
        num_values: of all parts.
    """

    def __init__(
        self,
        max_requests: int,
        num_drafts: int,
        tree: TreeSizes | None,
        *,
        saves_states: bool = False,
        num_margins: int = 0,
    ) -> None:
        self._room, self._num_drafts = DeviceStepRequests.list_length(max_requests), num_drafts
        self._no_branches = () if tree is None else (1.0, *[0.0] * (tree.width - 1))
        self._trim_sizes = self._room, num_drafts, len(self._no_branches)
        lists, none = (NUM_LISTS, self._room), (0,)
        self._shapes: dict[Part, tuple[int, ...]] = {
            "decoding": lists,
            "blocks": none if tree is None else lists,
            "trim": (TrimLists.num_values(*self._trim_sizes),),
            "prompts": lists,
            "saves": (2, 2, self._room, MAX_SAVES) if saves_states else none,
            "margins": (num_margins,),
        }
        ends = np.cumsum([math.prod(shape) for shape in self._shapes.values()]).tolist()
        self._places = dict(zip(self._shapes, map(slice, [0, *ends], ends), strict=False))
        self.num_values: int = ends[-1]

    def end(self, part: Part) -> int:
        """Return the number of values up to the end of a part."""
        return self._places[part].stop

    def part(self, values: Tensor, part: Part) -> Tensor:
        """Return a view of a part in `values`, int32, which may end after it."""
        return values[self._places[part]].view(self._shapes[part])

    def trim(self, values: Tensor) -> TrimLists:
        return TrimLists.views_of(self.part(values, "trim"), *self._trim_sizes)

    def pack(self, plan: SchedulerOutput, decoding_G: Indices, prompts_G: Indices) -> IntArray:
        """Return the integers of a plan. Margins are zeros.

        Args:
            decoding_G, prompts_G: indices of the requests in the plan.
        """
        packed = np.zeros(self.num_values, dtype=np.int32)
        factors = self._no_branches if plan.tree is None else plan.tree.factors
        self._write(packed, "decoding", self._pack_requests(plan, decoding_G))
        self._write(packed, "prompts", self._pack_requests(plan, prompts_G))
        trim = TrimLists.pack(plan.trim, decoding_G, self._room, self._num_drafts, factors)
        self._write(packed, "trim", trim)
        if self._no_branches:
            blocks = plan.with_num_drafts(plan.block_drafts)
            self._write(packed, "blocks", self._pack_requests(blocks, decoding_G))
        if plan.saves is not None:
            saves = [pack_saves(plan, requests_G, self._room) for requests_G in (decoding_G, prompts_G)]
            self._write(packed, "saves", np.stack(saves))
        return packed

    def write_margins(self, packed: IntArray, margins_N: NDArray[np.float32]) -> None:
        self._write(packed, "margins", margins_N.view(np.int32))

    def _write(self, packed: IntArray, part: Part, values: IntArray) -> None:
        packed[self._places[part]] = values.ravel()

    def _pack_requests(self, plan: SchedulerOutput, requests_G: Indices) -> IntArray:
        slots_G, rows_G, drafts_G = (x[requests_G] for x in (plan.slots, plan.num_rows, plan.num_drafts))
        return pack(slots_G, rows_G, drafts_G, plan.samples[requests_G], self._room)
