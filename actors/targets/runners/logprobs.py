"""Log probabilities where the device drives the steps, computed after a step's passes for requested rows.

Their logits are computed again, a few rows at a time, from hidden states: the step's own logits are already
filtered, and too large to keep, especially in a graph. The results follow the step's tokens in the one copy
to the host; nothing waits. `drafter/step/sampling/logprobs.py` describes the values. Called by
`gpu_runner.py`.

    [decode ─▶ hidden, tokens]  [prompts ─▶ hidden, tokens]  ─▶ requested rows ─▶ head ─▶ values (to host)

Legend: R requests, N rows, H hidden, W most tokens of a request, Y requested rows, E values per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....cluster.request.logprobs import StepLogprobs
from ....cluster.step.scheduler_output import SchedulerOutput
from ....drafter.step.gpu_triton.request_states import DeviceStates
from ....drafter.step.sampling.logprobs import (
    LogprobRows,
    num_packed_values,
    pack_logprobs_in_chunks,
    unpack_logprobs,
)
from ..model.decoder import Decoder

_UNKNOWN = 2**30  # a position after any prompt


class Computed(NamedTuple):
    """Results of one of a step's passes, on the device.

    Attributes:
        requests: their indices in the plan.
        hidden_NH: hidden states of its rows, request by request; padding may follow.
        tokens_RW: int32, each request's new tokens, padded with -1.
        num_drafts_R: int32, numbers of verified drafts, known only on the device; None if no request drafts.
        paths_RD: int32, the rows of each request's accepted path in its tree; None if drafts are chains.
    """

    requests: Sequence[int]
    hidden_NH: Tensor
    tokens_RW: Tensor
    num_drafts_R: Tensor | None
    paths_RD: Tensor | None

    def rows(self, plan: SchedulerOutput, place: int, begin: int, count: int) -> Tensor:
        """Return hidden states of a request's rows; those after its last row are arbitrary."""
        if self.num_drafts_R is None:
            first = int(plan.num_rows[self.requests[:place]].sum()) + begin
            return self.hidden_NH[first : first + count]
        first = self.num_drafts_R[:place].sum() + place + begin
        if self.paths_RD is None:
            steps = torch.arange(count, device=self.hidden_NH.device)
        else:
            steps = self.paths_RD[place, :count].clamp(min=0)
        return self.hidden_NH.index_select(0, (first + steps).clamp(max=len(self.hidden_NH) - 1))


@dataclass(frozen=True, slots=True)
class RequestedLogprobs:
    """The rows of a step with requested log probabilities: of sampled tokens, and of prompt tokens.

    Without any there are no rows, and nothing is launched or read.
    """

    chosen: LogprobRows | None
    prompts: LogprobRows | None
    vocab_size: int

    @classmethod
    def of(cls, plan: SchedulerOutput, states: DeviceStates, vocab_size: int) -> RequestedLogprobs:
        """Return the requested rows, counted within their request."""
        if not states.logprob_slots.in_use:
            return cls(None, None, vocab_size)
        numbers = (plan.slots, plan.num_rows, plan.num_drafts, plan.num_computed)
        slots_R, num_rows_R, drafts_R, first_R = (x.astype(np.int64) for x in numbers)
        counts_R = (plan.block_drafts.astype(np.int64) + 1) * plan.samples
        chosen = states.logprob_slots.chosen(slots_R, num_rows_R - drafts_R - 1, counts_R)
        prompts = states.logprob_slots.prompts(slots_R, np.where(first_R < 0, _UNKNOWN, first_R), num_rows_R)
        return cls(chosen, prompts, vocab_size)

    @property
    def num_rows(self) -> int:
        """Y, the number of requested rows."""
        return sum(
            int(logprob_rows.counts_A.sum())
            for logprob_rows in (self.chosen, self.prompts)
            if logprob_rows is not None
        )

    @property
    def num_top(self) -> int:
        return max(
            logprob_rows.num_top for logprob_rows in (self.chosen, self.prompts) if logprob_rows is not None
        )

    @property
    def num_values(self) -> int:
        """Y x E, the number of values."""
        num_rows = self.num_rows
        return num_rows * num_packed_values(self.num_top, self.vocab_size) if num_rows else 0

    def launch(
        self,
        plan: SchedulerOutput,
        passes: Iterable[Computed],
        model: Decoder,
        states: DeviceStates,
        values: Tensor,
    ) -> int:
        """Launch the computation into the beginning of `values`, int32; return how many it fills."""
        if not (num_values := self.num_values):
            return 0
        places = {request: (pass_, i) for pass_ in passes for i, request in enumerate(pass_.requests)}
        parts: list[tuple[Tensor, Tensor]] = []
        for request, begin, count in _runs(self.chosen):
            computed, i = places[request]
            parts.append((computed.rows(plan, i, begin, count), computed.tokens_RW[i, :count]))
        token_ids = states.tables.token_ids
        for request, _, count in _runs(self.prompts):
            slot, next_position = int(plan.slots[request]), int(plan.num_computed[request]) + 1
            computed, i = places[request]
            parts.append(
                (computed.rows(plan, i, 0, count), token_ids[slot, next_position : next_position + count])
            )
        hidden_YH, ids_Y = (torch.cat(each) for each in zip(*parts, strict=True))
        packed_YE = pack_logprobs_in_chunks(hidden_YH, ids_Y.clamp(min=0).long(), model.logits, self.num_top)
        values[:num_values].copy_(packed_YE.view(-1))
        return num_values

    def read(self, values: Tensor) -> tuple[StepLogprobs | None, StepLogprobs | None]:
        """Return the log probabilities of sampled tokens and of prompt tokens from values on the host."""
        if not self.num_rows:
            return None, None
        packed_YE = values[: self.num_values].view(self.num_rows, -1).numpy()
        num_chosen = 0 if self.chosen is None else int(self.chosen.counts_A.sum())
        chosen = None if self.chosen is None else unpack_logprobs(packed_YE[:num_chosen], self.chosen)
        prompts = None if self.prompts is None else unpack_logprobs(packed_YE[num_chosen:], self.prompts)
        return chosen, prompts


def _runs(logprob_rows: LogprobRows | None) -> Iterable[tuple[int, int, int]]:
    """Yield (request, first row, number of rows)."""
    if logprob_rows is None:
        return ()
    columns = (logprob_rows.requests_A, logprob_rows.begins_A, logprob_rows.counts_A)
    return zip(*(column.tolist() for column in columns), strict=True)
