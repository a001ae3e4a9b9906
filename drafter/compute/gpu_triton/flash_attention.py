"""Attention of prompts by the package flash-attn, of other rows by `paged_attention.py`. Optional.

    flash_attn.cute        FlashAttention 4, on sm_100: any page size, heads of up to 128, with sinks
    flash_attn_interface   FlashAttention 3, on Hopper: any page size
    flash_attn             FlashAttention 2: pages of a multiple of 256 tokens

Prompts have thousands of rows, for which the package's kernels are made. Blocks that are verified or drafted
have few rows, to which it would read the same keys once per query head without splitting long contexts.
Kinds of layers that it does not support are computed by our kernel as well. Not for sinks before
FlashAttention 4, MLA, fp32 or batch invariance. A `backend.PagedAttention`.

Legend: N rows, B requests, Q query heads, K kv heads, D head dim, F that of values, P pages, S page size.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backend import DeviceCapabilities, ModelStackSpec
from . import backend
from .attention.attention_tiles import AttentionKind, PagedRows, WorkList

logger = logging.getLogger(__name__)

_PAGE_MULTIPLE = 256  # of FlashAttention 2
_CUTE, _INTERFACE = "flash_attn.cute", "flash_attn_interface"
_HOPPER, _BLACKWELL = 9, 10  # major versions of the compute capability


def why_not(spec: ModelStackSpec, machine: DeviceCapabilities) -> str | None:
    try:
        package = _load(machine.device)
    except ImportError as error:
        return f"needs the package flash_attn ({error}): pip install flash-attn"
    if package is _Package2 and machine.page_size % _PAGE_MULTIPLE:
        return f"reads pages of a multiple of 256 tokens (page_size=256), page_size is {machine.page_size}"
    if machine.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16 (dtype=bfloat16), dtype is {machine.dtype}"
    if machine.kv_dtype is not None:
        return "reads K/V of the model's dtype (kv_cache_dtype=auto), not of eight bits"
    if "attention sinks" in spec.features and not package.has_sinks:
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
        """Return what layers of a kind share; requests are prompts if the host knows their lengths.

        The package has no masks of a tree's ancestors.
        """
        is_supported = kind.head_dim <= self._package.max_head_dim and kind.first_key == 0
        if (
            rows.host_spans_B2 is None
            or rows.tree is not None
            or not is_supported
            or kind.v_head_dim != kind.head_dim
        ):
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
        assert v_scale == 1.0, "refused before a weight was read"
        if isinstance(prepared, WorkList):
            return self._split(q_NQD, k_PSKD, v_PSKF, rows, prepared, scale, sinks_Q=sinks_Q)
        kind = prepared.kind
        out_NQD = self._package(q_NQD, k_PSKD, v_PSKF, rows, prepared, scale, sinks_Q)
        return out_NQD.view(len(q_NQD), kind.num_heads * kind.v_head_dim)


def _windows(kind: AttentionKind, unlimited: int | None) -> tuple[int | None, int | None]:
    """Return the numbers of keys before and after a row that it sees beside its own."""
    if kind.window is None:
        return unlimited, unlimited
    return kind.window - 1, 0 if kind.causal else kind.window - 1


class _Package4:
    """FlashAttention 4's `flash_attn_varlen_func` over pages."""

    max_head_dim, has_sinks = 128, True

    def __init__(self) -> None:
        self._attend = importlib.import_module(_CUTE).flash_attn_varlen_func

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKD: Tensor,
        rows: PagedRows,
        prepared: _Prepared,
        scale: float,
        sinks_Q: Tensor | None,
    ) -> Tensor:
        out_NQD, _ = self._attend(
            q_NQD,
            k_PSKD,
            v_PSKD,
            cu_seqlens_q=rows.cu_rows,
            max_seqlen_q=rows.max_rows,
            seqused_k=rows.kv_lengths_B,
            page_table=prepared.pages_BP,
            softmax_scale=scale,
            causal=prepared.kind.causal,
            window_size=_windows(prepared.kind, None),
            learnable_sink=sinks_Q,
        )
        return out_NQD


class _Package3:
    """FlashAttention 3's `flash_attn_with_kvcache`, with ragged queries."""

    max_head_dim, has_sinks = 256, False

    def __init__(self) -> None:
        self._attend = importlib.import_module(_INTERFACE).flash_attn_with_kvcache

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKD: Tensor,
        rows: PagedRows,
        prepared: _Prepared,
        scale: float,
        _sinks_Q: Tensor | None,
    ) -> Tensor:
        return self._attend(
            q_NQD,
            k_PSKD,
            v_PSKD,
            cache_seqlens=rows.kv_lengths_B,
            page_table=prepared.pages_BP,
            cu_seqlens_q=rows.cu_rows,
            max_seqlen_q=rows.max_rows,
            softmax_scale=scale,
            causal=prepared.kind.causal,
            window_size=_windows(prepared.kind, -1),
        )


class _Package2:
    """FlashAttention 2's `flash_attn_varlen_func` over pages."""

    max_head_dim, has_sinks = 256, False

    def __init__(self) -> None:
        self._attend: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKD: Tensor,
        rows: PagedRows,
        prepared: _Prepared,
        scale: float,
        _sinks_Q: Tensor | None,
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
            max_seqlen_k=prepared.pages_BP.shape[1] * k_PSKD.shape[1],
            softmax_scale=scale,
            causal=prepared.kind.causal,
            window_size=_windows(prepared.kind, -1),
            block_table=prepared.pages_BP,
        )


def _load(device: torch.device) -> type[_Package2] | type[_Package3] | type[_Package4]:
    """Return the newest package for this device. Raises ImportError without one."""
    for name, package, capability in ((_CUTE, _Package4, _BLACKWELL), (_INTERFACE, _Package3, _HOPPER)):
        if _has(name) and _capability(device) == capability:
            return package
    if not hasattr(_imported("flash_attn"), "flash_attn_varlen_func"):
        raise ImportError("FlashAttention 4 alone, for sm_100")
    return _Package2


def _has(name: str) -> bool:
    try:
        _imported(name)
    except ImportError:
        return False
    return True


def _imported(name: str) -> ModuleType:
    """Import a module. Raises ImportError for any failure: packages compile at import, and raise anything."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise
    except Exception as error:
        logger.warning("%s is installed, but its import failed: %r. It is not used.", name, error)
        raise ImportError(f"{name} fails with {error!r}") from error


def _capability(device: torch.device) -> int:
    """Return the major version of a GPU's compute capability; 0 for a CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
