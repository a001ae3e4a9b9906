"""Bounds how long prompts may delay the decoding requests that share their step.

A step returns tokens only at its end, so prompt rows delay the tokens of decoding requests in the same step
(900 rows of a small model on two cores take 0.4 s). `PrefillBudget` measures what a prompt row adds to a step
and limits prompt rows so that the step takes at most `_MAX_DELAY_S` longer, or `_MAX_DELAY_STEPS` times a
decoding step if that is more: with smaller chunks, most of the time would be spent reading the weights. On a
GPU the limit usually exceeds `max_num_batched_tokens` and has no effect.

Used by `step_controller.py` only. Does not access sequences.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_MAX_DELAY_S = 0.08  # not noticeable to a reader; half of the 0.2 s that another request's stream may pause
_MAX_DELAY_STEPS = 4.0  # then prompts get four fifths of the time, and take 1.25 times as long
_NUM_SAMPLES = 5  # latest samples whose median is used, so that one slow step has no effect
_FIRST_ROWS = 128  # while no chunk of `_MIN_ROWS` has been measured
_MIN_ROWS = 32  # minimum chunk; shorter prompts take no longer than a step's own noise
_MAX_GROWTH = 4  # growth over the largest measured chunk: the first one of a size also touches new memory


class PrefillBudget:
    """Chooses the prompt rows of steps in which other requests decode, for one engine.

    Args:
        max_rows: rows of a step, `max_num_batched_tokens`.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._decode_s: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._row_s: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._most_measured = 0

    def rows(self) -> int:
        """Return the maximum prompt rows in a step in which other requests decode."""
        if not self._decode_s:
            return self._max_rows
        if not self._row_s:
            return min(_FIRST_ROWS, self._max_rows)
        max_delay_s = max(_MAX_DELAY_S, _MAX_DELAY_STEPS * median(self._decode_s))
        rows = max_delay_s / max(median(self._row_s), max_delay_s / self._max_rows)
        known = max(_FIRST_ROWS, _MAX_GROWTH * self._most_measured)
        return min(max(int(rows), _MIN_ROWS), known, self._max_rows)

    def learn(self, prompt_rows: int, seconds: float) -> None:
        """Record the seconds of a step.

        Args:
            prompt_rows: its prompt rows; 0 if all its requests decoded.
            seconds: its seconds; 0 if nothing was measured, which is ignored.
        """
        if seconds <= 0.0:
            return
        if not prompt_rows:
            self._decode_s.append(seconds)
        elif prompt_rows >= _MIN_ROWS or not self._row_s:
            decode_s = median(self._decode_s) if self._decode_s else 0.0
            self._row_s.append(max(seconds - decode_s, 0.0) / prompt_rows)
            if prompt_rows >= _MIN_ROWS:
                self._most_measured = max(self._most_measured, prompt_rows)
