"""Decides what joins the steps of decoding online requests: rows of their prompts, and background work.

*Prompts of online requests* delay the tokens of the decoding ones. They get the rows that make a step at
most `_MAX_DELAY_S` longer, or `_MAX_DELAY_STEPS` decoding steps if that is more: smaller chunks would spend
most of the time reading the weights.

*Background work* may take a share of the online requests' time (`_SHARE`). It is saved while they decode, and
spent by the measured seconds of steps with background work minus the predicted ones without it. Cheap work
joins first: on a GPU decoding requests join every step; on a CPU one request joins once in several steps.
Without online requests in the step, background work gets what lasts as long as a prompt may delay them.

Costs are predicted by `StepCostModel`. Legend: M amounts of work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..speculation.step_cost_model import MAX_GROWTH, Amounts, Doubles, StepCostModel, StepLoad
from ..step.scheduler_output import IntArray

_SHARE = 0.03  # of the time of online requests' decoding: p95 of the time per token may grow by a tenth
_MAX_SAVED = 2.0  # steps; also the largest debt, so that an interruption does not stop background work
_MAX_DELAY_S = 0.08  # not noticeable to a reader; half of the 0.2 s that another request's stream may pause
_MAX_DELAY_STEPS = 4.0  # then prompts get four fifths of the time, and take 1.25 times as long
CHUNK = 32  # prompt rows, the unit of prompts; fewer take no longer than a step's own noise


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """The most decoding requests and prompt rows of background work, or of prompts, in one step."""

    num_decoding: int
    prompt_rows: int

    def limit_rows(self, wanted_R: IntArray, known_R: IntArray) -> IntArray:
        """Return the wanted rows that fit, in rank order; 0 for sequences once this is used up."""
        decodes_R = known_R == 1
        prompt_R = np.where(decodes_R, 0, wanted_R)
        remaining_R = np.maximum(self.prompt_rows - (np.cumsum(prompt_R) - prompt_R), 0)
        fits_R = np.cumsum(decodes_R) <= self.num_decoding
        return np.where(decodes_R, np.where(fits_R, wanted_R, 0), np.minimum(prompt_R, remaining_R))


NOTHING = BackgroundWork(0, 0)


class BackgroundBudget:
    """Chooses the prompt rows and the background work of one engine's steps.

    Args:
        max_rows: maximum rows of a step.
        chunks: whether a prompt may be computed in parts.
    """

    def __init__(self, costs: StepCostModel, max_rows: int, *, chunks: bool) -> None:
        self._costs, self._max_rows, self._chunks = costs, max_rows, chunks
        self._saved_s = 0.0  # for background work
        steps = np.arange(0, max_rows + CHUNK, CHUNK) if chunks else np.array([0, max_rows])
        self._prompts_M = np.minimum(steps, max_rows)
        self._base_s = 0.0  # predicted seconds of the last step with online requests, without other work

    def prompt_rows(self, load: StepLoad, length: int, measured_rows: int) -> int:
        """Return the most prompt rows of online requests beside `load`, with drafts of this length.

        Args:
            measured_rows: the most prompt rows of a measured step.
        """
        if not self._chunks or not self._costs.has_measurements:
            return self._max_rows
        load = load._replace(prompt_rows=self._prompts_M)
        costs_M = self._costs.step_s(load, length)
        rows = self._prompts_M[max(_count(costs_M - costs_M[0], _max_delay_s(costs_M[0])), 1)]
        return min(int(rows), MAX_GROWTH * max(measured_rows, CHUNK))

    def with_online(self, load: StepLoad, length: int, num_decoding: int) -> BackgroundWork:
        """Return the work to add to a step in which the online requests `load` decode with drafts of this
        length; `num_decoding` background requests could decode.
        """
        if not self._costs.has_measurements:
            return NOTHING
        all_M = 1.0 + np.arange(num_decoding + 1) / load.num_requests
        costs_M = self._costs.step_s(
            load._replace(num_requests=load.num_requests * all_M, context=load.context * all_M), length
        )
        self._base_s = float(costs_M[0])
        decoding = self._affordable(costs_M, self._saved_s)
        left_s = self._saved_s - (costs_M[decoding] - costs_M[0])
        costs_M = self._costs.step_s(load._replace(prompt_rows=self._prompts_M), length)
        prompts = self._affordable(costs_M, left_s)
        return BackgroundWork(decoding, int(self._prompts_M[prompts]))

    def _affordable(self, costs_M: Doubles, saved_s: float) -> int:
        """Return the largest amount that is cheap, or else the smallest one, if it is covered."""
        if len(costs_M) == 1:
            return 0
        added_M = costs_M - costs_M[0]
        if min(added_M[1], _MAX_SAVED * self._base_s) > saved_s:
            return 0
        # What was saved beyond one step is spent on more than is cheap by present predictions.
        return max(_count(added_M, min(max(_SHARE * self._base_s, saved_s - self._base_s), saved_s)), 1)

    def without_online(
        self, num_decoding: int, length: int, context: Amounts, *, quiet: bool
    ) -> BackgroundWork:
        """Return the work of a step without online requests, in which `num_decoding` requests with `context`
        tokens each could decode. All do if it is `quiet`: no online request arrived recently.
        """
        if not self._base_s:
            return BackgroundWork(num_decoding, self._max_rows)
        limit_s = _max_delay_s(self._base_s) if quiet else _MAX_DELAY_STEPS * self._base_s
        if not quiet:
            num_M = np.arange(num_decoding + 1)
            num_decoding = min(
                max(_count(self._costs.step_s(StepLoad(num_M, 0, context * num_M), length), limit_s), 1),
                num_decoding,
            )
        costs_M = self._costs.step_s(StepLoad(num_decoding, self._prompts_M, context * num_decoding), length)
        return BackgroundWork(num_decoding, int(self._prompts_M[max(_count(costs_M, limit_s), 1)]))

    def observe(self, base_s: float, seconds: float) -> None:
        """Record the seconds of a step in which online requests decoded, and those without other work."""
        self._base_s = base_s
        saved_s = min(self._saved_s + _SHARE * base_s, _MAX_SAVED * base_s)
        self._saved_s = max(saved_s - (seconds - base_s), -_MAX_SAVED * base_s)


def _max_delay_s(step_s: float) -> float:
    return max(_MAX_DELAY_S, _MAX_DELAY_STEPS * step_s)


def _count(rising_M: Doubles, limit: float) -> int:
    """Return the index of the last amount within the limit."""
    return int(np.searchsorted(np.maximum.accumulate(rising_M), limit, side="right")) - 1
