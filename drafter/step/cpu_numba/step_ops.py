"""`StepOperators` for CPUs, in compiled loops.

Each NumPy or PyTorch call takes a microsecond or more, and a step of one request needs dozens of them. The
loops are in this folder's other files, by the name of the operator. Operators without a loop here are the
definition's. Chosen at load (`actors/targets/loading/operator_factory.py`).

Legend: X sampled rows, N rows, V vocabulary, R requests, K most drafts or candidates, W values of a request,
M rows with temperature > 0, E rank, S slots, P pages, T tokens, G page groups.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....cluster.step.scheduler_output import IntArray, SchedulerOutput
from ...compute.cpu_numba.element_ops import LIKE
from ...grammars.token_bitmasks import RowMasks
from ..inputs.proposals import Proposals
from ..inputs.row_layout import Ints, Layout, RequestRows, StepRows
from ..inputs.sampling_metadata import SamplingMetadata
from ..sampling.selector import SelectorCodebooks
from ..sampling.step_ops import StepOperators
from ..sampling.top_k_top_p import floors
from . import grammar_masks, gumbel_argmax, row_layout, selector, verification

_NOTHING = {torch.int64: np.int64(-1), torch.float32: np.float32(np.nan)}


class LoopStepOperators(StepOperators):
    """Operators for state in host memory; logits are fp32 or bf16. See the definitions."""

    @staticmethod
    def lay_out_rows(tokens_ST: Tensor, rows_R: RequestRows, page_tables_GSP: Ints, page_size: int) -> Layout:
        where = (page_tables_GSP, page_size)
        token_ids_N, *layout = row_layout.lay_out_rows(tokens_ST.numpy(), *rows_R, *where)
        return torch.from_numpy(token_ids_N), *layout

    @staticmethod
    def write_tokens(
        tokens_ST: Tensor, slots_R: Ints, begin_R: Ints, counts_R: Ints, values_RW: Tensor
    ) -> None:
        row_layout.write_tokens(tokens_ST.numpy(), slots_R, begin_R, counts_R, values_RW.numpy())

    @staticmethod
    def by_request(values_X: Tensor, counts_R: Tensor, width: int) -> Tensor:
        """Scatter int64 or fp32 values."""
        assert counts_R.dtype == torch.int64, "read by address"
        values_X, counts_R = values_X.contiguous(), counts_R.contiguous()
        num_requests, nothing = len(counts_R), _NOTHING[values_X.dtype]
        values_RW = torch.empty(num_requests, width, dtype=values_X.dtype)
        addresses = (values_X.data_ptr(), counts_R.data_ptr(), values_RW.data_ptr())
        row_layout.by_request(*addresses, num_requests, width, nothing)
        return values_RW

    @staticmethod
    def mask_tokens(logits_NV: Tensor, masks: RowMasks) -> Tensor:
        """Edit in place if contiguous."""
        logits_NV = logits_NV.contiguous()
        grammar_masks.mask_tokens(
            logits_NV.data_ptr(), masks.rows_M.ctypes.data, masks.bits_MW.ctypes.data, masks.end_id,
            len(masks.rows_M), logits_NV.shape[1], masks.bits_MW.shape[1], LIKE[logits_NV.dtype],
        )  # fmt: skip
        return logits_NV

    @staticmethod
    def argmax_margin(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV = logits_NV.contiguous()
        ids_N, margins_N = torch.empty(len(logits_NV), dtype=torch.int64), torch.empty(len(logits_NV))
        addresses = (logits_NV.data_ptr(), ids_N.data_ptr(), margins_N.data_ptr())
        gumbel_argmax.argmax_margin(*addresses, *logits_NV.shape, LIKE[logits_NV.dtype])
        return ids_N, margins_N

    @staticmethod
    def are_numbers(logits_NV: Tensor) -> Tensor:
        logits_NV = logits_NV.contiguous()
        found_N = torch.empty(len(logits_NV), dtype=torch.bool)
        addresses, bits = (logits_NV.data_ptr(), found_N.data_ptr()), gumbel_argmax.BITS[logits_NV.dtype]
        gumbel_argmax.are_numbers(*addresses, *logits_NV.shape, *bits)
        return found_N

    @staticmethod
    def noisy_argmax_margin(
        logits_MV: Tensor, temperature_M1: Tensor, key_2M1: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits_MV = logits_MV.contiguous()
        ids_M, margins_M = torch.empty(len(logits_MV), dtype=torch.int64), torch.empty(len(logits_MV))
        tensors = (logits_MV, temperature_M1, key_2M1, ids_M, margins_M)
        addresses = (x.data_ptr() for x in tensors)
        gumbel_argmax.noisy_argmax_margin(*addresses, *logits_MV.shape, LIKE[logits_MV.dtype])
        return ids_M, margins_M

    @staticmethod
    def candidates(logits_XV: Tensor, batch: SamplingMetadata, top_k: int) -> tuple[Tensor, Tensor]:
        logits_XV = logits_XV.contiguous()
        num_rows, vocab_size = logits_XV.shape
        assert top_k <= vocab_size, "as many candidates as there are tokens"
        z_XK, ids_XK = torch.empty(num_rows, top_k), torch.empty(num_rows, top_k, dtype=torch.int64)
        noisy_M, floor_M1 = batch.noisy_M, None
        if noisy_M is not None and batch.narrows:
            floor_M1 = floors(logits_XV.index_select(0, noisy_M), batch)
        selector.candidates(
            logits_XV.data_ptr(), _addresses(noisy_M, batch.temperature_M1, batch.key_2M1, floor_M1),
            0 if noisy_M is None else len(noisy_M), z_XK.data_ptr(), ids_XK.data_ptr(), num_rows, vocab_size,
            top_k, LIKE[logits_XV.dtype],
        )  # fmt: skip
        return z_XK, ids_XK

    @staticmethod
    def walk(
        z_XK: Tensor, ids_XK: Tensor, gates_XE: Tensor, block: StepRows, codebooks: SelectorCodebooks
    ) -> Proposals:
        """Walk with gates and codebooks of fp32 or bf16."""
        num_requests, width, batch = len(block.counts_R), block.max_count, block.sampling
        drafts_RW = torch.empty(num_requests, width, dtype=torch.int64)
        margins_RW, gates_XE = torch.empty(num_requests, width), gates_XE.contiguous()
        predecessor_VE, successor_VE = codebooks.predecessor_VE, codebooks.successor_VE
        rows = (block.token_ids_N, block.sampled_X)
        block_sizes = (len(block.token_ids_N), block.anchor_distance)
        filters = (batch.top_k_M, batch.top_p_M1, batch.min_p_M1)
        selector.walk(
            _addresses(z_XK, ids_XK, gates_XE, predecessor_VE, successor_VE, *rows),
            _addresses(batch.noisy_M, batch.temperature_M1, batch.key_2M1, *filters),
            0 if batch.noisy_M is None else len(batch.noisy_M),
            _addresses(block.counts_R, drafts_RW, margins_RW),
            (num_requests, width, *z_XK.shape, *predecessor_VE.shape, *block_sizes),
            LIKE[gates_XE.dtype],
            LIKE[predecessor_VE.dtype],
        )
        return Proposals(drafts_RW, margins_RW)

    @staticmethod
    def trim(margins_RK: Tensor, plan: SchedulerOutput) -> IntArray:
        trim = plan.trim
        assert trim is not None, "asked where drafts are cut"
        return verification.trim(
            margins_RK.numpy(), plan.num_drafts, plan.num_rows, trim.bias_R, trim.bias_K, trim.slope_K,
            trim.weights_R, trim.seconds_N, -1 if trim.num_rows is None else trim.num_rows,
            np.float32(trim.rate),
        )  # fmt: skip

    @staticmethod
    def accept(chosen_X: Tensor, counts_R: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
        assert chosen_X.dtype == counts_R.dtype == drafts_RK.dtype == torch.int64, "read by address"
        chosen_X, counts_R, drafts_RK = chosen_X.contiguous(), counts_R.contiguous(), drafts_RK.contiguous()
        num_requests, num_drafts = drafts_RK.shape
        token_ids_RW = torch.empty(num_requests, num_drafts + 1, dtype=torch.int64)
        num_tokens_R = torch.empty(num_requests, dtype=torch.int64)
        tensors = (chosen_X, counts_R, drafts_RK, token_ids_RW, num_tokens_R)
        verification.accept(*(x.data_ptr() for x in tensors), num_requests, num_drafts)
        return token_ids_RW, num_tokens_R


def _addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return the tensors' addresses; 0 for None."""
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


LOOPS = LoopStepOperators()
