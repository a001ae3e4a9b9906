"""The fused backend's operators as the host calls them: one compiled call each.

Constants and addresses that do not change between steps are bound once; a call passes what a step has. The
compiled code is in `packed_gemm.py`, `qkv_heads.py` and `attention.py`. Made by `backend.py`; a whole pass is
`fused_forward.py`.

Legend: R requests, N rows, K inputs, O outputs, J heads, L layers, D head dim, P pages.
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..backend import Device, Ints, PlacedRows
from ..checkpoint.quantized_matrix import JoinedRows, Matrix
from ..layers.rope import RotaryEmbedding
from ..memory.kv_cache import PagedKVCache
from .packed_gemm import PRODUCT, decoded_offset, run_product, scratch_bytes
from .packed_weight import pack
from .qkv_heads import CONTEXT, write_context
from .threads.thread_team import team_address


class PackedLinear:
    """`layers.Linear` of bf16 for weights that satisfy `can_pack`: summed in fp32, rounded once."""

    __slots__ = (
        "_num_threads",
        "_record_1",
        "_scratch_bytes",
        "bias_O",
        "in_features",
        "out_features",
        "weight",
    )

    def __init__(self, weight_OK: Matrix | JoinedRows, bias_O: Tensor | None, num_threads: int) -> None:
        self.out_features, self.in_features = weight_OK.shape
        self.bias_O, self.weight = bias_O, pack(weight_OK)
        self._num_threads = num_threads
        self._scratch_bytes = scratch_bytes(self.in_features, self.weight.num_groups)
        self._record_1 = self.weight.record(decoded_offset(self.in_features))

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        x_NK = x_NK.contiguous()
        residual_NO = None if residual_NO is None else residual_NO.contiguous()  # alive until it is read
        y_NO = x_NK.new_empty(len(x_NK), self.out_features)
        scratch_1 = torch.empty(self._scratch_bytes * self._num_threads, dtype=torch.uint8)
        run_product(
            team_address(self._num_threads), PRODUCT.address, self._num_threads, x_NK.data_ptr(),
            self._record_1.ctypes.data, 0 if self.bias_O is None else self.bias_O.data_ptr(),
            0 if residual_NO is None else residual_NO.data_ptr(), y_NO.data_ptr(), len(x_NK),
            self.in_features, self.out_features, scratch_1.data_ptr(), self._scratch_bytes,
        )  # fmt: skip
        return y_NO


class BlockedContextWriter:
    """A `backend.ContextWriter` into the blocks of `qkv_heads.py`.

    The rotation and the first layer of a writer do not change; the cache rarely does.
    """

    __slots__ = ("_cache", "_context_1", "_group", "_norm_JD")

    def __init__(self, k_norm_LD: Tensor, eps: float, num_kv_heads: int) -> None:
        self._norm_JD = k_norm_LD.float().repeat_interleave(num_kv_heads, dim=0)
        self._context_1 = np.zeros(1, dtype=CONTEXT)
        c = self._context_1[0]
        c["num_layers"], c["num_kv"], c["eps"] = len(k_norm_LD), num_kv_heads, eps
        c["head_dim"], c["head_norm"] = k_norm_LD.shape[1], self._norm_JD.data_ptr()
        self._cache: PagedKVCache | None = None  # the cache whose addresses are stored
        self._group = 0

    def __call__(
        self, kv_NO: Tensor, rope: RotaryEmbedding, rows: PlacedRows, cache: PagedKVCache, first: int
    ) -> None:
        if cache is not self._cache:
            self._use_cache(cache, rope, first)
        slots_N = rows.kv_slots[self._group]
        write_context(
            self._context_1, kv_NO.data_ptr(), len(kv_NO), rows.positions_N.data_ptr(), slots_N.data_ptr()
        )

    def _use_cache(self, cache: PagedKVCache, rope: RotaryEmbedding, first: int) -> None:
        c = self._context_1[0]
        self._cache, self._group = cache, cache.group(first)
        c["kv"] = cache.slots(first, int(c["num_layers"])).data_ptr()
        c["plane_bytes"], c["cos"], c["sin"] = (
            cache.plane_bytes,
            rope.cos_TD.data_ptr(),
            rope.sin_TD.data_ptr(),
        )


@dataclass(frozen=True, slots=True)
class PagedContexts:
    """The requests of a step, this backend's `AttentionBatch`. int64, in host memory.

    Attributes:
        first_R, rows_R: absolute position of each request's first row, and its rows.
        pages_RP, pages_address: page ids of each request from position 0 on; their address.
        longest: length of the longest context.
        paths_ND: int32, the rows' paths (`draft_trees.py`); None if all requests are chains.
    """

    first_R: Ints
    rows_R: Ints
    pages_RP: Ints
    pages_address: int
    page_size: int
    longest: int
    paths_ND: Ints | None = None

    @staticmethod
    def build(
        first_R: Ints,
        rows_R: Ints,
        pages_RP: Ints,
        page_size: int,
        device: Device,
        window: int | None = None,
        paths_ND: Ints | None = None,
    ) -> PagedContexts:
        if paths_ND is not None:
            paths_ND = np.ascontiguousarray(paths_ND, dtype=np.int32)
        first_R, rows_R = (np.ascontiguousarray(x, dtype=np.int64) for x in (first_R, rows_R))
        longest = int((first_R + rows_R).max())
        pages_RP = np.ascontiguousarray(pages_RP, dtype=np.int64)
        return PagedContexts(first_R, rows_R, pages_RP, pages_RP.ctypes.data, page_size, longest, paths_ND)
