"""The requests of all replicas of a simulated fleet as arrays, advanced by a short step of time at once.

The speed of each of b running requests and the time of a prompt's token are a table (`replica.py`); nothing
else runs during a prompt (chunked prefill slows the others down by as much). All requests of a replica run
at the same speed, so each is stored as the *work* at which it ends: the number of tokens that a request
present from the beginning would have generated. Within a step of time a replica's speed is constant, but
arrivals, beginnings and ends have exact times. `test_bench_fleet.py` compares a replica with an engine.
Used by `replicas.py`.

Legend: N rows, one for a replica; C running requests of a row; Q waiting requests of a row; A arrivals.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .replica import ReplicaModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_EPS = 1e-9
_FIRST_ROWS = 16


class FleetSlots:
    """The running and waiting requests of replicas of one model.

    Args:
        prompts, outputs: tokens of each request [A].

    Attributes:
        first_s, end_s: time of the first token and of the end of each request [A]; NaN until then.
        count, waiting: number of running and waiting requests of each row [N].
        kv_tokens: tokens that the running requests hold at their ends [N].
        finished, tokens: number of ended requests and of their tokens [N].
        last_end_s: time at which a row's last request ended [N].
    """

    def __init__(self, model: ReplicaModel, arrival_s: Floats, prompts: Ints, outputs: Ints) -> None:
        self._model = model
        self._arrival_s, self._prompts, self._outputs = arrival_s, prompts, outputs
        self._held = np.minimum(prompts + outputs, model.kv_tokens)
        self._step_s = np.array(model.step_s)
        self._pace = np.concatenate(([0.0], np.array(model.step_tokens) / self._step_s))
        self.first_s = np.full(len(prompts), np.nan)
        self.end_s = np.full(len(prompts), np.nan)
        slots = model.max_num_seqs
        self._ends_NC = np.empty((0, slots))
        self._ids_NC = np.empty((0, slots), dtype=np.int64)
        self._queue_NQ = np.empty((0, slots + model.max_waiting), dtype=np.int64)  # slots may lack pages
        self._head = np.empty(0, dtype=np.int64)
        self._next_end, self._done, self._free_s = np.empty(0), np.empty(0), np.empty(0)
        self.count, self.waiting = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self.kv_tokens, self.last_end_s = np.empty(0), np.empty(0)
        self.finished, self.tokens = np.empty(0, dtype=np.int64), np.empty(0)
        self._grow(_FIRST_ROWS)

    @property
    def num_rows(self) -> int:
        return len(self.count)

    @property
    def load(self) -> Ints:
        return self.count + self.waiting

    def pace(self) -> Floats:
        """Return the tokens/s of each running request of each row [N]."""
        return self._pace[self.count]

    def clear(self, row: int) -> None:
        while row >= self.num_rows:
            self._grow(self.num_rows)
        assert not self.load[row], "the row still has requests"
        for values in (self._done, self._free_s, self.kv_tokens, self.last_end_s, self.tokens):
            values[row] = 0.0
        self.finished[row] = self._head[row] = 0

    def _grow(self, more: int) -> None:
        for name, empty in (
            ("_ends_NC", np.inf), ("_ids_NC", 0), ("_queue_NQ", 0), ("_head", 0), ("_next_end", np.inf),
            ("_done", 0), ("_free_s", 0), ("count", 0), ("waiting", 0), ("kv_tokens", 0), ("last_end_s", 0),
            ("finished", 0), ("tokens", 0),
        ):  # fmt: skip
            old = getattr(self, name)
            rows = np.full((more, *old.shape[1:]), empty, dtype=old.dtype)
            setattr(self, name, np.concatenate((old, rows)))

    def advance(self, begin_s: float, end_s: float) -> None:
        """Advance all requests from `begin_s` to `end_s`. Ended requests make room for waiting ones."""
        pace = self.pace()
        self._done += np.maximum(end_s - np.maximum(self._free_s, begin_s), 0.0) * pace
        due = np.flatnonzero(self._next_end <= self._done + _EPS * (1.0 + np.abs(self._done)))
        if len(due) == 0:
            return
        within = self._ends_NC[due] <= (self._done[due] + _EPS * (1.0 + np.abs(self._done[due])))[:, None]
        picked, columns = np.nonzero(within)
        rows = due[picked]
        ids = self._ids_NC[rows, columns]
        at_s = end_s - np.maximum(self._done[rows] - self._ends_NC[rows, columns], 0.0) / pace[rows]
        self.end_s[ids] = np.maximum(at_s, self.first_s[ids])
        self._ends_NC[rows, columns] = np.inf
        np.subtract.at(self.count, rows, 1)
        np.subtract.at(self.kv_tokens, rows, self._held[ids])
        np.add.at(self.finished, rows, 1)
        np.add.at(self.tokens, rows, self._outputs[ids])
        self._next_end[due] = self._ends_NC[due].min(axis=1)
        np.maximum.at(self.last_end_s, rows, self.end_s[ids])
        self._begin_waiting(rows, at_s, end_s)

    def _begin_waiting(self, rows: Ints, free_at_s: Floats, now_s: float) -> None:
        """Begin waiting requests of rows where requests ended at `free_at_s`, one per row and round."""
        waits = self.waiting[rows] > 0
        rows, free_at_s = rows[waits], free_at_s[waits]
        order = np.lexsort((free_at_s, rows))
        rows, free_at_s = rows[order], free_at_s[order]
        each, place = np.unique(rows, return_index=True)
        last = np.append(place[1:], len(rows)) - 1
        while len(each):
            heads = self._queue_NQ[each, self._head[each] % self._queue_NQ.shape[1]]
            fits = (self.waiting[each] > 0) & self._has_room(each, heads)
            each, heads, place, last = each[fits], heads[fits], place[fits], last[fits]
            self._head[each] += 1
            self.waiting[each] -= 1
            self._begin(each, heads, np.maximum(free_at_s[place], self._arrival_s[heads]), now_s)
            place = np.minimum(place + 1, last)  # if more fit than ended: at the last end

    def give(self, rows: Ints, ids: Ints, at_s: Floats, now_s: float) -> None:
        """Give requests to distinct replicas. `now_s` is the end of the current step."""
        direct = (self.waiting[rows] == 0) & self._has_room(rows, ids)
        self._begin(rows[direct], ids[direct], at_s[direct], now_s)
        late, waiting = rows[~direct], ids[~direct]
        self._queue_NQ[late, (self._head[late] + self.waiting[late]) % self._queue_NQ.shape[1]] = waiting
        self.waiting[late] += 1

    def _has_room(self, rows: Ints, ids: Ints) -> NDArray[np.bool_]:
        fits = self.kv_tokens[rows] + self._held[ids] <= self._model.kv_tokens
        return fits & (self.count[rows] < self._model.max_num_seqs)

    def _begin(self, rows: Ints, ids: Ints, at_s: Floats, now_s: float) -> None:
        """Begin requests. A prompt runs once the replica is free; the others' work in that time is undone."""
        begin_s = np.maximum(self._free_s[rows], at_s)
        free_s = begin_s + self._prompts[ids] * self._model.prompt_token_s
        stood_s = np.maximum(np.minimum(free_s, now_s) - np.minimum(begin_s, now_s), 0.0)
        self._done[rows] -= stood_s * self._pace[self.count[rows]]
        self._free_s[rows] = free_s
        self.count[rows] += 1
        self.first_s[ids] = free_s + self._step_s[self.count[rows] - 1]
        went_on = np.maximum(now_s - free_s, 0.0) * self._pace[self.count[rows]]
        columns = np.isinf(self._ends_NC[rows]).argmax(axis=1)
        ends = self._done[rows] + self._outputs[ids] - went_on
        self._ends_NC[rows, columns], self._ids_NC[rows, columns] = ends, ids
        self._next_end[rows] = np.minimum(self._next_end[rows], ends)
        self.kv_tokens[rows] += self._held[ids]
