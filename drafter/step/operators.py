"""What a step driven from the host does with rows, tokens and choices: the operators, and what they mean.

    StepOperators           what `states.py`, `sampling.py` and whoever runs a step are given
      TorchStepOperators    NumPy and PyTorch, anywhere: `rows.py`, `lookup.py`, `masks.py`, `choice.py`,
                            `candidates.py`, `paths.py`, `trimming.py`, `verification.py`
      LoopStepOperators     compiled loops, on a CPU: `loops/`, of the same files

Which ones is chosen where a runner is made (`actors/targets/loading/operators.py`). A GPU's own steps have
kernels instead, that read state on the device: `device/`.

Legend: as in `rows.py`, `choice.py`, `paths.py` and `verification.py`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...cluster.plan import IntArray, SchedulerOutput
from ..grammars.masks import RowMasks
from . import candidates, choice, lookup, masks, paths, rows, trimming, verification
from .paths import Codebooks
from .proposals import Proposals
from .rows import Ints, Layout, StepRows
from .sampling_batch import SamplingBatch


class StepOperators(Protocol):
    """See the functions of the same names; integers are equal, noise to units in the last place."""

    def lay_out_rows(
        self,
        tokens_ST: Tensor,
        slots_R: Ints,
        first_R: Ints,
        num_rows_R: Ints,
        counts_R: Ints,
        page_tables_GSP: Ints,
        page_size: int,
        /,
    ) -> Layout:
        """Of `rows.py`."""
        ...

    def write_tokens(
        self, tokens_ST: Tensor, slots_R: Ints, begin_R: Ints, counts_R: Ints, values_RW: Tensor, /
    ) -> None:
        """Of `rows.py`."""
        ...

    def by_request(self, values_X: Tensor, counts_R: Tensor, width: int, /) -> Tensor:
        """Of `rows.py`."""
        ...

    def look_up(
        self, tokens_ST: Tensor, slots_R: Ints, ends_R: Ints, counts_R: Ints, shortest: int, longest: int, /
    ) -> Tensor:
        """Of `lookup.py`."""
        ...

    def mask_tokens(self, logits_NV: Tensor, masks: RowMasks, /) -> Tensor:
        """Of `masks.py`."""
        ...

    def argmax_margin(self, logits_NV: Tensor, /) -> tuple[Tensor, Tensor]:
        """Of `choice.py`."""
        ...

    def are_numbers(self, logits_NV: Tensor, /) -> Tensor:
        """Of `choice.py`."""
        ...

    def noisy_argmax_margin(
        self, logits_MV: Tensor, temperature_M1: Tensor, key_2M1: Tensor, /
    ) -> tuple[Tensor, Tensor]:
        """Of `choice.py`."""
        ...

    def candidates(self, logits_XV: Tensor, batch: SamplingBatch, top_k: int, /) -> tuple[Tensor, Tensor]:
        """Of `candidates.py`."""
        ...

    def walk(
        self, z_XK: Tensor, ids_XK: Tensor, gates_XE: Tensor, block: StepRows, codebooks: Codebooks, /
    ) -> Proposals:
        """Of `paths.py`."""
        ...

    def trim(self, margins_RK: Tensor, plan: SchedulerOutput, /) -> IntArray:
        """Of `trimming.py`."""
        ...

    def take_out(self, drafts_RK: Tensor, num_drafts_R: Tensor, /) -> Tensor:
        """Of `trimming.py`."""
        ...

    def accept(self, chosen_X: Tensor, counts_R: Tensor, drafts_RK: Tensor, /) -> tuple[Tensor, Tensor]:
        """Of `verification.py`."""
        ...


class TorchStepOperators:
    """The definition."""

    lay_out_rows = staticmethod(rows.lay_out_rows)
    write_tokens = staticmethod(rows.write_tokens)
    by_request = staticmethod(rows.by_request)
    look_up = staticmethod(lookup.look_up)
    mask_tokens = staticmethod(masks.mask_tokens)
    argmax_margin = staticmethod(choice.argmax_margin)
    are_numbers = staticmethod(choice.are_numbers)
    noisy_argmax_margin = staticmethod(choice.noisy_argmax_margin)
    candidates = staticmethod(candidates.candidates)
    walk = staticmethod(paths.walk)
    trim = staticmethod(trimming.trim)
    take_out = staticmethod(trimming.take_out)
    accept = staticmethod(verification.accept)


DEFINITION = TorchStepOperators()
