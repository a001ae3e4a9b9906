"""Prompt look-up: proposes the tokens that followed an earlier occurrence of a sequence's last tokens.

Of the last n tokens, n from `longest` down to `shortest`, the longest run that occurs earlier is taken, at
its last occurrence, and the tokens after it are proposed. If they reach the end of the sequence, the copy
continues with the tokens proposed so far, so repeating text is continued for as many drafts as are wanted:

    known   a b c x y a b c          the last 3, a b c, occur earlier
    drafts                  x y a b

In NumPy, for steps that the host drives; `step/gpu_triton/ngram_lookup.py` does the same in a kernel. Called
by `drafter/step/request_states.py`.

Legend: R requests of a step, K most drafts, S slots, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..inputs.row_layout import Ints


def look_up(
    tokens_ST: Tensor, slots_R: Ints, ends_R: Ints, counts_R: Ints, shortest: int, longest: int
) -> Tensor:
    """Return drafts [R, K] (int64) on the device of `tokens`; -1 where nothing is found.

    Args:
        ends_R: number of known tokens of each request.
        counts_R: number of drafts wanted for each request; K is the largest of them.
    """
    drafts_RK = np.full((len(slots_R), int(counts_R.max(initial=0))), -1, dtype=np.int64)
    for r in np.flatnonzero(counts_R).tolist():
        known_T, count = tokens_ST[int(slots_R[r]), : int(ends_R[r])].cpu().numpy(), int(counts_R[r])
        begin = _continuation(known_T, shortest, longest)
        if begin is not None:
            drafts_RK[r, :count] = known_T[begin + np.arange(count) % (len(known_T) - begin)]
    return torch.from_numpy(drafts_RK).to(tokens_ST.device)


def _continuation(known_T: Ints, shortest: int, longest: int) -> int | None:
    """Return where the continuation of the last tokens begins; None if they occur nowhere earlier."""
    last, begin = len(known_T) - 1, None
    ends = np.flatnonzero(known_T[:last] == known_T[last])  # ends of earlier runs that match so far
    for length in range(1, longest + 1):
        if not len(ends):
            break
        if length >= shortest:
            begin = int(ends[-1]) + 1
        ends = ends[ends >= length]
        ends = ends[known_T[ends - length] == known_T[last - length]]
    return begin
