"""A step's outcome and its copy to the host: tokens, numbers of verified drafts, margins and times.

    Outcome    int32 values of one iteration, in memory of the device or the host
    Homeward   device memory where iterations write them, and the pinned memory they are copied to

The copy of a few KB follows a step's last kernel in the same stream, and the host does not wait for it. On
another stream the next step would have to wait for it just as well, as a graph writes its outcome to the
memory of the last one. Called by `gpu_runner.py`.

Legend: R requests, W most tokens of a request, D = W - 1 drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_IN_FLIGHT = 4
NUM_TIMES = 5  # the start, and the ends of at most four parts


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Views of consecutive int32 values.

    Attributes:
        times: int64 [NUM_TIMES], nanoseconds: the start of the first part and the end of each part.
        reads_1: int64, `Backend.expert_reads` after the last part, if the target has experts.
        rows_RW1: int32 [R, W + 1], the new tokens of each request padded with -1; the last column is their
            number.
        num_drafts_R: int32, verified drafts; not written if no request drafts.
        margins_RD: fp32, margins of the drafts; nan where there is none.
    """

    times: Tensor
    reads_1: Tensor
    rows_RW1: Tensor
    num_drafts_R: Tensor
    margins_RD: Tensor

    @staticmethod
    def num_values(num_requests: int, width: int) -> int:
        """Return the number of values, rounded up to 16 bytes so that another outcome may follow."""
        return 2 * (NUM_TIMES + 1) + (num_requests * (2 * width + 1) + 3) // 4 * 4

    @classmethod
    def views_of(cls, values: Tensor, num_requests: int, width: int) -> StepOutput:
        """Return views of the first of these values."""
        r, maximum, begin = num_requests, width - 1, 2 * (NUM_TIMES + 1)
        head, rows, drafts, margins, _ = values.split(
            (begin, r * (width + 1), r, r * maximum, len(values) - begin - r * (2 * width + 1))
        )
        times, reads_1 = head.view(torch.int64).split((NUM_TIMES, 1))
        return cls(times, reads_1, rows.view(r, -1), drafts, margins.view(torch.float32).view(r, maximum))


@dataclass(frozen=True, slots=True)
class PendingResult:
    """Host memory that values are copied to; `copied` is None where copies are synchronous."""

    values: Tensor
    copied: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self.copied is None or self.copied.query()

    def wait(self) -> Tensor:
        if self.copied is not None:
            self.copied.synchronize()
        return self.values


class ResultCopier:
    """Copies outcomes to the host.

    Args:
        num_values: most values of a step.

    Attributes:
        values: int32 [num_values] on the device.
    """

    def __init__(self, num_values: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.values = torch.zeros(num_values, dtype=torch.int32, device=device)
        self._arrivals = [
            PendingResult(
                torch.empty(num_values, dtype=torch.int32, pin_memory=on_gpu),
                torch.cuda.Event() if on_gpu else None,
            )
            for _ in range(MAX_IN_FLIGHT)
        ]
        self._next = 0

    def copy_to_host(self, num_values: int) -> PendingResult:
        """Start to copy the first values. Their host memory is reused after `MAX_IN_FLIGHT` steps."""
        arrival = self._arrivals[self._next]
        self._next = (self._next + 1) % MAX_IN_FLIGHT
        arrival.values[:num_values].copy_(self.values[:num_values], non_blocking=True)
        if arrival.copied is not None:
            arrival.copied.record()
        return arrival
