"""Prompt lookup on a device; on a host by `drafter/ngram/proposer.py`."""

from __future__ import annotations

import math

from .....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests
from .....drafter.step.gpu_triton.ngram_lookup import look_up
from .device_trees import StepTrees
from .draft_source import DeviceDrafts, StepMemory


class DeviceLookup(DeviceDrafts):
    """`lengths`: shortest and longest run of tokens to match."""

    has_margins = False

    def __init__(self, lengths: tuple[int, int], memory: StepMemory) -> None:
        self._lengths, self._memory = lengths, memory

    def propose(self, requests: DeviceStepRequests, trees: StepTrees | None, *, filters: bool) -> None:
        look_up(requests, self._memory.states.tables, *self._lengths)
        self._memory.workspace.margins_N[: requests.num_rows].fill_(math.nan)
