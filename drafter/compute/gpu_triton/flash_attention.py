"""Attention of prompts by the package flash-attn, of other rows by `paged_attention.py`. Optional.

    flash_attn_interface   FlashAttention 3, on Hopper: any page size
    flash_attn             FlashAttention 2: pages of a multiple of 256 tokens

Prompts have thousands of rows, for which the package's kernels are made. Blocks that are verified or drafted
have few rows, to which it would read the same keys once per query head without splitting long contexts.
Kinds of layers that it does not support are computed by our kernel as well. Not for gpt-oss (no sinks), MLA,
fp32 or batch invariance. A `backend.PagedAttention`.

Legend: N rows, B requests, Q query heads, K kv heads, D head dim, F that of values, P pages, S page size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backend import DeviceCapabilities, ModelStackSpec
from . import backend
from .attention.attention_tiles import AttentionKind, PagedRows, WorkList

_PAGE_MULTIPLE = 256  # of FlashAttention 2
_MAX_HEAD_DIM = 256


def why_not(spec: ModelStackSpec, machine: DeviceCapabilities) -> str | None:
    try:
        package = _load(machine.device)
    except ImportError as error:
        return f"needs the package flash_attn ({error}): pip install 'manta[flash-attn]'"
    if package is _Package2 and machine.page_size % _PAGE_MULTIPLE:
        return f"reads pages of a multiple of 256 tokens (page_size=256), page_size is {machine.page_size}"
    if machine.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16 (dtype=bfloat16), dtype is {machine.dtype}"
    if machine.kv_dtype is not None:
        return "reads K/V of the model's dtype (kv_cache_dtype=auto), not of eight bits"
    if "attention sinks" in spec.features:
        return f"has no attention sinks, which the {spec.name} needs"
    if "latent attention" in spec.features:
        return f"has no latent attention, which the {spec.name} needs"
    return backend.why_not(spec, machine)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A pass of prompts, for layers of one kind that the package computes.

    Attributes:
        pages_BP: int32, the requests' rows of the page table.
    """

    kind: AttentionKind
    pages_BP: Tensor


class FlashAttention:
    """The package for prompts, `backend.SplitAttention` for other rows."""

    def __init__(self, device: torch.device | str) -> None:
        self._package = _load(torch.device(device))()
        self._split = backend.SplitAttention(device)

    def reserve(self, v_head_dim: int) -> None:
        self._split.reserve(v_head_dim)

    def prepare(self, kind: AttentionKind, rows: PagedRows) -> _Prepared | WorkList:
        """Return what layers of a kind share; requests are prompts if the host knows their lengths."""
        if rows.host_spans_B2 is None or not _is_supported(kind):
            return self._split.prepare(kind, rows)
        return _Prepared(kind, rows.page_table.index_select(0, rows.slots_B))

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKF: Tensor,
        rows: PagedRows,
        prepared: _Prepared | WorkList,
        scale: float,
        *,
        v_scale: float = 1.0,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """Attend; see `paged_attention.verify_attention`. Returns [N, Q * F]."""
        assert sinks_Q is None and v_scale == 1.0, "refused before a weight was read"
        if isinstance(prepared, WorkList):
            return self._split(q_NQD, k_PSKD, v_PSKF, rows, prepared, scale)
        kind, window = prepared.kind, prepared.kind.window
        neighbors = -1 if window is None else window - 1  # the package counts neighbors, -1 for unlimited
        windows = (neighbors, 0 if kind.causal and window is not None else neighbors)
        out_NQD = self._package(
            q_NQD, k_PSKD, v_PSKF, rows, prepared.pages_BP, scale, causal=kind.causal, windows=windows
        )
        return out_NQD.view(len(q_NQD), -1)


def _is_supported(kind: AttentionKind) -> bool:
    """Return whether the package computes such layers."""
    return kind.head_dim <= _MAX_HEAD_DIM and kind.v_head_dim == kind.head_dim and kind.first_key == 0


class _Package3:
    """FlashAttention 3's `flash_attn_with_kvcache`, with ragged queries."""

    def __init__(self) -> None:
        self._attend = _interface3().flash_attn_with_kvcache

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKD: Tensor,
        rows: PagedRows,
        pages_BP: Tensor,
        scale: float,
        *,
        causal: bool,
        windows: tuple[int, int],
    ) -> Tensor:
        return self._attend(
            q_NQD,
            k_PSKD,
            v_PSKD,
            cache_seqlens=rows.kv_lengths_B,
            page_table=pages_BP,
            cu_seqlens_q=rows.cu_rows,
            max_seqlen_q=rows.max_rows,
            softmax_scale=scale,
            causal=causal,
            window_size=windows,
        )


class _Package2:
    """FlashAttention 2's `flash_attn_varlen_func` over pages."""

    def __init__(self) -> None:
        self._attend: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKD: Tensor,
        rows: PagedRows,
        pages_BP: Tensor,
        scale: float,
        *,
        causal: bool,
        windows: tuple[int, int],
    ) -> Tensor:
        cu_keys = F.pad(rows.kv_lengths_B.cumsum(0, dtype=torch.int32), (1, 0))
        return self._attend(
            q_NQD,
            k_PSKD,
            v_PSKD,
            cu_seqlens_q=rows.cu_rows,
            cu_seqlens_k=cu_keys,  # with a block table only the differences matter
            # At 1 the package would use row b as request b's and ignore cu_seqlens_q.
            max_seqlen_q=max(rows.max_rows, 2),
            max_seqlen_k=pages_BP.shape[1] * k_PSKD.shape[1],
            softmax_scale=scale,
            causal=causal,
            window_size=windows,
            block_table=pages_BP,
        )


def _load(device: torch.device) -> type[_Package2] | type[_Package3]:
    """Return the newest package for this device. Raises ImportError without one."""
    try:
        _interface3()
    except ImportError:
        pass
    else:
        if _is_hopper(device):
            return _Package3
    importlib.import_module("flash_attn")
    return _Package2


def _interface3() -> Any:  # Any: an optional package without types
    return importlib.import_module("flash_attn_interface")


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
